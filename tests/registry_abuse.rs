//! Both sockets against peers that do not speak the protocol, say nothing, or never listen: the
//! connection is closed or held back, and the daemon goes on serving others, in bounded memory
//! and without burning a processor.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use std::path::Path;
use std::time::{Duration, Instant};

use futures::FutureExt;
use node::{LIMIT, Node, limit, refusal, registration};
use nri_lease_proto::lease::admin::WatchRequest;
use nri_lease_proto::lease::registry::RenewRequest;
use nri_lease_proto::lease::types::EventKind;
use nri_lease_proto::protobuf::Message;
use nri_lease_proto::ttrpc::{self, Code};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// What hostile peers may make the daemon grow by. A debug build starts at about 15 MiB.
const GROWTH_KIB: u64 = 24 << 10;

const REQUEST: u8 = 1;
const DATA: u8 = 3;
/// A stream's first frame: the peer will send more, and this one carries nothing.
const OPEN_WITHOUT_DATA: u8 = 2 | 4;

fn header(length: u32, stream: u32, kind: u8, flags: u8) -> Vec<u8> {
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend(stream.to_be_bytes());
    bytes.extend([kind, flags]);
    bytes
}

fn frame(stream: u32, kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header(payload.len() as u32, stream, kind, flags);
    bytes.extend(payload);
    bytes
}

fn request(stream: u32, flags: u8, service: &str, method: &str, payload: Vec<u8>) -> Vec<u8> {
    let request = ttrpc::Request {
        service: service.into(),
        method: method.into(),
        payload,
        ..Default::default()
    };
    frame(stream, REQUEST, flags, &request.write_to_bytes().unwrap())
}

fn renewal() -> Vec<u8> {
    let request = RenewRequest {
        plugin: "p".into(),
        ..Default::default()
    };
    request.write_to_bytes().unwrap()
}

/// Reads a frame: its stream and what it carries.
async fn receive(stream: &mut (impl AsyncReadExt + Unpin)) -> (u32, Vec<u8>) {
    let reading = async {
        let length = stream.read_u32().await.unwrap();
        let id = stream.read_u32().await.unwrap();
        stream.read_u16().await.unwrap();
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await.unwrap();
        (id, body)
    };
    let frame = tokio::time::timeout(LIMIT, reading).await;
    frame.expect("an answer in time")
}

/// Reads an answer: its stream, its code and its text.
async fn answer(stream: &mut (impl AsyncReadExt + Unpin)) -> (u32, Code, String) {
    let (id, body) = receive(stream).await;
    let status = ttrpc::Response::parse_from_bytes(&body).unwrap().status;
    (id, status.code(), status.message.clone())
}

/// Writes, and reads whatever comes until the daemon closes the connection; returns the answer.
async fn send_until_closed(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let (mut read, mut write) = UnixStream::connect(socket).await.unwrap().into_split();
    let mut answer = Vec::new();
    let both = async {
        // The daemon may close before it has taken everything.
        let sending = async { drop(write.write_all(bytes).await) };
        let reading = async { drop(read.read_to_end(&mut answer).await) };
        tokio::join!(sending, reading)
    };
    tokio::time::timeout(LIMIT, both)
        .await
        .expect("the daemon closes the connection");
    answer
}

/// Writes until the daemon takes no more for a while; returns how many bytes it took.
async fn pour(stream: &mut UnixStream, bytes: &[u8], at_most: usize) -> usize {
    const TAKES_NO_MORE: Duration = Duration::from_millis(700);
    let mut taken = 0;
    while taken < at_most {
        let rest = &bytes[taken % bytes.len()..];
        match tokio::time::timeout(TAKES_NO_MORE, stream.write(rest)).await {
            Ok(Ok(count)) => taken += count,
            Ok(Err(_)) | Err(_) => break,
        }
    }
    taken
}

struct Watched {
    node: Node,
    before: u64,
}

impl Watched {
    async fn start() -> Watched {
        let node = Node::start("").await;
        node.registers("p").await;
        node.leases().await;
        let before = node.rss_kib();
        Watched { node, before }
    }

    /// It serves others.
    async fn is_well(&self, after: &str) {
        let begin = Instant::now();
        self.node.registers("good").await;
        self.node.leases().await;
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(5), "after {after}: {took:?}");
        let grown = self.node.peak_rss_kib().saturating_sub(self.before);
        println!("after {after}: grown by at most {grown} KiB, served in {took:?}");
        assert!(grown < GROWTH_KIB, "after {after}: grown by {grown} KiB");
    }
}

#[tokio::test]
async fn bytes_that_are_no_request_close_the_connection_and_nothing_else() {
    let it = Watched::start().await;
    let mut random = fastrand::Rng::with_seed(1);
    let noise = |length| {
        std::iter::repeat_with(|| random.u8(..))
            .take(length)
            .collect()
    };
    let noises: Vec<Vec<u8>> = [1 << 4, 1 << 12, 1 << 20].into_iter().map(noise).collect();
    for socket in [it.node.registry_socket(), it.node.admin_socket()] {
        for (what, bytes) in [
            ("5 MiB of zeros", vec![0; 5 << 20]),
            ("a frame of 4 GiB", header(u32::MAX, 1, REQUEST, 0)),
            ("a frame of 257 KiB", header(257 << 10, 1, REQUEST, 0)),
            ("an answer nobody asked for", header(0, 1, 2, 0)),
            ("an even stream", header(0, 2, REQUEST, 0)),
            ("a kind that is none", header(0, 1, 99, 0)),
            ("16 random bytes", noises[0].clone()),
            ("4 KiB of noise", noises[1].clone()),
            ("1 MiB of noise", noises[2].clone()),
            (
                "HTTP",
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            ),
        ] {
            let answer = send_until_closed(&socket, &bytes).await;
            assert!(
                answer.len() < 4096,
                "{what}: {} bytes of answer",
                answer.len()
            );
            it.is_well(what).await;
        }
    }
    it.node.becomes_idle().await;
}

/// Frames are whole; what is in them is not a request, or ends in the middle.
#[tokio::test]
async fn a_frame_with_a_truncated_message_is_answered_with_an_error() {
    let it = Watched::start().await;
    let whole = request(
        1,
        0,
        "nri.lease.v1.Registry",
        "Register",
        registration("p", 60).write_to_bytes().unwrap(),
    );
    let whole = &whole[10..];
    let mut stream = UnixStream::connect(it.node.registry_socket())
        .await
        .unwrap();
    let mut errors = 0;
    for (number, length) in (1..whole.len()).enumerate() {
        let id = 2 * number as u32 + 1;
        stream
            .write_all(&frame(id, REQUEST, 0, &whole[..length]))
            .await
            .unwrap();
        let (to, code, _) = answer(&mut stream).await;
        assert_eq!(to, id);
        errors += usize::from(code != Code::OK);
    }
    // A message cut between two fields is a message.
    assert!(errors > whole.len() - 10, "{errors} of {}", whole.len());
    it.is_well("truncated messages").await;
    it.node.becomes_idle().await;
}

#[tokio::test]
async fn an_unknown_service_or_method_is_an_error_on_a_connection_that_lives_on() {
    let node = Node::start("").await;
    let mut stream = UnixStream::connect(node.registry_socket()).await.unwrap();
    for (id, service, method) in [
        (1, "nri.lease.v1.Registry", "Explode"),
        (3, "nri.lease.v2.Registry", "Register"),
        // Of the other socket.
        (5, "nri.lease.v1.Admin", "RevokeLease"),
        (7, "", ""),
    ] {
        let bytes = request(id, 0, service, method, Vec::new());
        stream.write_all(&bytes).await.unwrap();
        let (_, code, text) = answer(&mut stream).await;
        assert_ne!(code, Code::OK, "{service}/{method}");
        let named = if service.ends_with("v1.Registry") {
            method
        } else {
            service
        };
        assert!(text.contains(named), "{text}");
    }
    node.registers("p").await;
}

#[tokio::test]
async fn who_says_nothing_or_half_of_it_is_closed_after_ten_seconds() {
    let it = Watched::start().await;
    let whole = request(1, 0, "nri.lease.v1.Registry", "Register", Vec::new());
    let begin = Instant::now();
    let parts: [(&str, &[u8]); 4] = [
        ("nothing", &[]),
        ("one byte", &whole[..1]),
        ("half a header", &whole[..5]),
        ("half a request", &whole[..20]),
    ];
    let mut waiting = Vec::new();
    for socket in [it.node.registry_socket(), it.node.admin_socket()] {
        for (what, bytes) in parts {
            let (socket, bytes) = (socket.clone(), bytes.to_vec());
            waiting.push((
                what,
                tokio::spawn(async move {
                    send_until_closed(&socket, &bytes).await;
                    begin.elapsed()
                }),
            ));
        }
    }
    it.is_well("silent clients").await;
    for (what, closed) in waiting {
        let after = closed.await.unwrap();
        assert!(
            (9.0..20.0).contains(&after.as_secs_f64()),
            "{what}: closed after {after:?}"
        );
    }
    it.node.becomes_idle().await;
}

#[tokio::test]
async fn three_hundred_silent_connections_keep_nobody_out() {
    let it = Watched::start().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(
            UnixStream::connect(it.node.registry_socket())
                .await
                .unwrap(),
        );
    }
    it.is_well("300 silent connections").await;
    drop(silent);
    let fds = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", it.node.daemon.pid()));
        fds.unwrap().count()
    };
    node::until("their descriptors to be closed", async || fds() < 60).await;
    it.node.becomes_idle().await;
}

#[tokio::test]
async fn a_thousand_requests_at_once_are_all_answered_when_the_client_reads() {
    const REQUESTS: u32 = 1000;
    let it = Watched::start().await;
    let stream = UnixStream::connect(it.node.registry_socket())
        .await
        .unwrap();
    let (mut read, mut write) = stream.into_split();
    let sending = tokio::spawn(async move {
        for number in 0..REQUESTS {
            let bytes = request(
                2 * number + 1,
                0,
                "nri.lease.v1.Registry",
                "Renew",
                renewal(),
            );
            write.write_all(&bytes).await.unwrap();
        }
        write
    });
    it.is_well("requests nobody reads the answers of").await;
    let mut answered = std::collections::HashSet::new();
    for _ in 0..REQUESTS {
        let (id, code, text) = answer(&mut read).await;
        assert_eq!(code, Code::OK, "{text}");
        answered.insert(id);
    }
    assert_eq!(answered.len(), REQUESTS as usize);
    drop(sending.await.unwrap());
    it.node.becomes_idle().await;
}

/// Renewals, large and small, into a stream whose answers nobody reads.
#[tokio::test]
async fn a_keep_alive_stream_that_never_reads_is_held_back() {
    const AT_MOST: usize = 256 << 20;
    let it = Watched::start().await;
    let padded = RenewRequest {
        // A field the daemon does not know: weight.
        special_fields: {
            let mut fields = nri_lease_proto::protobuf::SpecialFields::new();
            let weight =
                nri_lease_proto::protobuf::UnknownValue::LengthDelimited(vec![7; 200 << 10]);
            fields.mut_unknown_fields().add_value(99, weight);
            fields
        },
        plugin: "p".into(),
        ..Default::default()
    };
    for (what, data) in [
        ("small renewals", renewal()),
        ("large renewals", padded.write_to_bytes().unwrap()),
        ("what cannot be decoded", vec![0xff; 100 << 10]),
    ] {
        let mut stream = UnixStream::connect(it.node.registry_socket())
            .await
            .unwrap();
        let open = request(
            1,
            OPEN_WITHOUT_DATA,
            "nri.lease.v1.Registry",
            "KeepAlive",
            Vec::new(),
        );
        stream.write_all(&open).await.unwrap();
        let taken = pour(&mut stream, &frame(1, DATA, 0, &data), AT_MOST).await;
        println!("{what}: {} KiB taken", taken >> 10);
        it.is_well(what).await;
        assert!(taken < AT_MOST, "{what}: all of it was taken");
        it.node.becomes_idle().await;
    }
}

/// Data for streams that are not open is answered, and the answers are not read.
#[tokio::test]
async fn data_for_no_stream_is_held_back_when_nobody_reads() {
    const AT_MOST: usize = 64 << 20;
    let it = Watched::start().await;
    let mut stream = UnixStream::connect(it.node.registry_socket())
        .await
        .unwrap();
    let taken = pour(&mut stream, &frame(77, DATA, 0, &[1; 4096]), AT_MOST).await;
    it.is_well("data for no stream").await;
    assert!(taken < AT_MOST, "all of it was taken");
    it.node.becomes_idle().await;
}

#[tokio::test]
async fn a_watch_that_never_reads_loses_the_oldest_events_and_is_told_how_many() {
    let it = Watched::start().await;
    let admin = it.node.admin().await;
    let payload = WatchRequest::new().write_to_bytes().unwrap();
    let mut deaf = UnixStream::connect(it.node.admin_socket()).await.unwrap();
    deaf.write_all(&request(1, 1, "nri.lease.v1.Admin", "Watch", payload))
        .await
        .unwrap();
    let mut good = admin
        .watch(ttrpc::context::with_timeout(0), &WatchRequest::new())
        .await
        .unwrap();

    let registry = it.node.registry().await;
    let renew = RenewRequest {
        plugin: "p".into(),
        ..Default::default()
    };
    // Both watches are there once an event has come through each.
    let mut first = receive(&mut deaf).boxed();
    let mut heard = (false, false);
    node::until("both to watch", async || {
        registry.renew(limit(), &renew).await.unwrap();
        let pause = Duration::from_millis(20);
        if !heard.0 {
            heard.0 = tokio::time::timeout(pause, &mut first).await.is_ok();
        }
        if !heard.1 {
            heard.1 = tokio::time::timeout(pause, good.recv()).await.is_ok();
        }
        heard == (true, true)
    })
    .await;
    drop(first);
    let mut stream = registry
        .keep_alive(ttrpc::context::with_timeout(0))
        .await
        .unwrap();
    for _ in 0..8000 {
        stream.send(&renew).await.unwrap();
        let answer = stream.recv().await.unwrap();
        assert_eq!(answer.error_code, 0, "{answer}");
        assert_eq!(
            good.recv()
                .await
                .unwrap()
                .unwrap()
                .kind
                .enum_value_or_default(),
            EventKind::EVENT_KIND_RENEWED
        );
    }
    it.is_well("a watch that never reads").await;

    // It listens at last: what is in its socket, then the gap, then the rest.
    let mut dropped = 0;
    while dropped == 0 {
        let (_, body) = receive(&mut deaf).await;
        let event = nri_lease_proto::lease::types::Event::parse_from_bytes(&body).unwrap();
        dropped = event.dropped;
    }
    println!("{dropped} events were dropped");
    assert!(dropped > 1000, "{dropped}");
    it.node.becomes_idle().await;
}

/// Nothing is read of a request whose stream is still open.
#[tokio::test]
async fn a_stream_opened_twice_closes_the_connection() {
    let node = Node::start("").await;
    let open = request(
        1,
        OPEN_WITHOUT_DATA,
        "nri.lease.v1.Registry",
        "KeepAlive",
        Vec::new(),
    );
    send_until_closed(&node.registry_socket(), &[open.clone(), open].concat()).await;
    let (code, _) = refusal(
        node.registry()
            .await
            .register(limit(), &registration("", 1))
            .await,
    );
    assert_eq!(code, Code::INVALID_ARGUMENT);
}

/// Renewals are answered from memory, thousands a second; each may look at the holder's sockets.
#[tokio::test]
async fn peers_that_renew_without_a_pause_keep_no_registration_waiting() {
    let it = Watched::start().await;
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut renewing = Vec::new();
    for _ in 0..8 {
        let (registry, stop) = (it.node.registry().await, stop.clone());
        renewing.push(tokio::spawn(async move {
            let renew = RenewRequest {
                plugin: "p".into(),
                ..Default::default()
            };
            let mut renewed = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let eight = std::iter::repeat_with(|| registry.renew(limit(), &renew)).take(8);
                let answers = futures::future::join_all(eight).await;
                assert!(answers.iter().all(Result::is_ok));
                renewed += answers.len();
            }
            renewed
        }));
    }
    let mut longest = Duration::ZERO;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let one = Instant::now();
        it.node.registers("good").await;
        longest = longest.max(one.elapsed());
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut renewed = 0;
    for peer in renewing {
        renewed += peer.await.unwrap();
    }
    println!("{renewed} renewals meanwhile; the slowest registration took {longest:?}");
    assert!(longest < Duration::from_millis(900), "{longest:?}");
    it.is_well("renewals without a pause").await;
    it.node.becomes_idle().await;
}
