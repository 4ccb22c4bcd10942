//! What the services share, and how a lease is described to people.

use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use nri_lease_proto::lease::types as pb;
use nri_lease_state::record::{Holder, LeaseRecord};
use nri_lease_state::rules::Lease;
use nri_lease_state::store::Store;
use nri_lease_state::time::Now;
use protobuf::{EnumOrUnknown, MessageField};

use crate::clock::SystemClock;
use crate::config::Config;
use crate::enforce::evidence::{Evidence, Live, Missing};
use crate::enforce::hooks::PublishedListings;
use crate::enforce::listings::Listings;
use crate::enforce::record::{Ring, Totals};
use crate::enforce::text;
use crate::engine::Engine;
use crate::events::Events;
use crate::nri::status::RuntimeStatus;
use crate::pods::Pods;
use crate::presence::{ConnectionState, RuntimeId, Tracker, View};
use crate::rpc::convert;

/// Everything a handler may need.
pub struct Daemon {
    pub engine: Engine,
    pub store: Arc<Store>,
    pub loaded_from: &'static str,
    pub state_dir: std::path::PathBuf,
    pub tracker: Tracker,
    pub runtimes: Vec<Arc<RuntimeStatus>>,
    pub pods: Arc<Pods>,
    pub events: Events,
    pub ring: Arc<Ring>,
    pub totals: Arc<Totals>,
    pub listings: PublishedListings,
    pub clock: SystemClock,
    pub config: arc_swap::ArcSwap<Config>,
    pub started_at: SystemTime,
}

impl Daemon {
    /// The NRI socket of a runtime, for people.
    pub fn socket_of(&self, runtime: RuntimeId) -> String {
        self.runtimes
            .iter()
            .find(|status| status.id == runtime)
            .map(|status| status.socket.display().to_string())
            .unwrap_or_default()
    }

    /// Live leases only.
    pub fn live_lease(&self, plugin: &str) -> Option<Arc<Lease>> {
        let now = self.clock.now();
        self.engine
            .snapshot()
            .state
            .lease(plugin)
            .filter(|lease| lease.counts_at(now.boottime))
            .cloned()
    }

    fn connected_runtimes(&self) -> impl Iterator<Item = RuntimeId> + '_ {
        self.runtimes
            .iter()
            .filter(|status| status.connected().is_some())
            .map(|status| status.id)
    }

    /// What the runtime's lists have told, as a request that comes now would find it.
    pub fn listings_of(&self, runtime: RuntimeId) -> Mutex<Listings> {
        let published = self.listings.load();
        let mut listings = published
            .get(&runtime)
            .map_or_else(Listings::default, |listings| Listings::clone(listings));
        listings.begin();
        Mutex::new(listings)
    }

    /// Why the plugin counts as missing now; None when it is present for every runtime that is
    /// connected.
    pub fn missing_reason(&self, lease: &Lease, now: &Now) -> Option<String> {
        let view = self.tracker.view();
        let mut any = false;
        for runtime in self.connected_runtimes() {
            any = true;
            let listings = self.listings_of(runtime);
            let evidence = Live::outside_hooks(&view, runtime, Some(&listings));
            if let Err(missing) = evidence.present(&lease.plugin, Some(lease)) {
                return Some(text::missing_briefly(&missing, Some(lease), now));
            }
        }
        if any {
            return None;
        }
        Some(match lease.holders.is_empty() {
            true => text::missing_briefly(&Missing::NoHolder, Some(lease), now),
            false => "no runtime is connected".to_owned(),
        })
    }

    /// A lease as `list` and `inspect` show it.
    pub fn describe(&self, lease: &Lease) -> pb::Lease {
        let now = self.clock.now();
        let snapshot = self.engine.snapshot();
        let view = self.tracker.view();
        let reason = self.missing_reason(lease, &now);
        let record: &LeaseRecord = lease;
        let end = lease.ends_at().unwrap_or(record.deadline.boottime);
        let pins = snapshot
            .state
            .pins()
            .values()
            .filter_map(|pins| pins.get(record.plugin.as_str()))
            .filter(|pin| pin.counts_at(now.boottime))
            .map(|pin| convert::pb_pin(pin, &now))
            .collect();
        pb::Lease {
            plugin: record.plugin.to_string(),
            state: EnumOrUnknown::new(match reason {
                None => pb::PluginState::PLUGIN_STATE_PRESENT,
                Some(_) => pb::PluginState::PLUGIN_STATE_MISSING,
            }),
            state_reason: reason.unwrap_or_default(),
            mode: convert::pb_mode(record.settings.mode),
            generation: record.generation,
            ttl: convert::pb_duration(record.settings.ttl.get()),
            expires_at: convert::pb_wall(now.wall_at(end)),
            expires_in: convert::pb_duration(now.until(end)),
            registered_at: convert::pb_wall(record.registered_at),
            renewed_at: convert::pb_wall(record.renewed_at),
            scope: MessageField::some(convert::pb_scope(&record.settings.scope)),
            holders: record
                .holders
                .iter()
                .map(|holder| self.describe_holder(holder, &view))
                .collect(),
            pins,
            index: record
                .settings
                .index
                .map(|index| index.to_string())
                .unwrap_or_default(),
            events: record
                .settings
                .events
                .map(|mask| pb::EventMask {
                    mask,
                    ..Default::default()
                })
                .into(),
            last_holder: record
                .last_holder
                .as_ref()
                .filter(|_| record.holders.is_empty())
                .map(|gone| pb::GoneHolder {
                    pid: gone.pid,
                    gone_at: convert::pb_wall(gone.gone_at),
                    ..Default::default()
                })
                .into(),
            ..Default::default()
        }
    }

    fn describe_holder(&self, holder: &Holder, view: &View) -> pb::Holder {
        let process = holder.facts.process;
        let mut detail = None;
        let mut any = false;
        for runtime in self.connected_runtimes() {
            any = true;
            let presence = view.check(&process, runtime, holder.facts.connection_inode);
            if presence != crate::presence::Presence::Bound {
                detail = Some(text::presence(&presence));
                break;
            }
        }
        if !any {
            detail = Some("no runtime is connected".to_owned());
        }
        let connections = view
            .connections(&process)
            .into_iter()
            .map(|connection| pb::Connection {
                socket: connection
                    .runtime
                    .map(|runtime| self.socket_of(runtime))
                    .unwrap_or_default(),
                inode: connection.inode,
                state: match connection.state {
                    ConnectionState::Pending => "pending",
                    ConnectionState::Accepted { .. } => "accepted",
                    ConnectionState::Bound => "bound",
                    ConnectionState::Broken => "broken",
                }
                .to_owned(),
                ..Default::default()
            })
            .collect();
        pb::Holder {
            pid: process.pid,
            uid: holder.facts.uid,
            start_time: process.start_time,
            connected: detail.is_none(),
            detail: detail.unwrap_or_default(),
            pod: holder
                .facts
                .pod
                .as_ref()
                .map(|pod| pb::Pod {
                    namespace: pod.namespace.clone().unwrap_or_default(),
                    name: pod.name.clone().unwrap_or_default(),
                    uid: pod.uid.to_string(),
                    ..Default::default()
                })
                .into(),
            registered_at: convert::pb_wall(holder.registered_at),
            connections,
            registered_by_pid: holder
                .facts
                .registered_by
                .map_or(0, |registrant| registrant.pid),
            ..Default::default()
        }
    }
}
