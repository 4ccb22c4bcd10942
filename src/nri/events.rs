//! Which NRI events we subscribe to. An event that a runtime does not know fails the registration,
//! so the choice follows the runtime's version and, where that says nothing, the larger set is
//! tried first and the smaller one when it was refused.

use nri_lease_proto::nri::nri::Event;

/// What the runtime's NRI can do for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// NRI 0.6 to 0.9: no validation. Containers are decided in CreateContainer, by the bound
    /// connection alone.
    WithoutValidation,
    /// NRI 0.10 and later: ValidateContainerAdjustment with the list of plugins.
    WithValidation,
}

impl Generation {
    /// The event mask for Configure: bit `1 << (event - 1)`.
    pub fn mask(self) -> i32 {
        let decides_containers = match self {
            Self::WithoutValidation => Event::CREATE_CONTAINER,
            Self::WithValidation => Event::VALIDATE_CONTAINER_ADJUSTMENT,
        };
        [
            Event::RUN_POD_SANDBOX,
            Event::REMOVE_POD_SANDBOX,
            decides_containers,
        ]
        .into_iter()
        .fold(0, |mask, event| mask | 1 << (event as i32 - 1))
    }
}

/// What is known of a runtime from its Configure request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeIdentity {
    /// "containerd", "cri-o".
    pub name: String,
    /// "v2.3.4"; distributions append their own suffixes.
    pub version: String,
    /// Empty before NRI 0.12.
    pub nri_version: String,
}

impl RuntimeIdentity {
    /// The runtime's own version as numbers, if it can be read.
    pub fn parsed_version(&self) -> Option<(u32, u32, u32)> {
        parse_version(&self.version)
    }

    /// NRI's minor version (0.x): as the runtime says, else from the table of releases.
    ///
    /// containerd 1.7 to 2.1 vendor NRI 0.6 to 0.8, 2.2 has 0.11, 2.3 has 0.12 (their go.mod);
    /// CRI-O has 0.10 from 1.34 on (its go.mod).
    pub fn nri_minor(&self) -> Option<u32> {
        if let Some((0, minor, _)) = parse_version(&self.nri_version) {
            return Some(minor);
        }
        let (major, minor, _) = self.parsed_version()?;
        match self.name.as_str() {
            "containerd" => match (major, minor) {
                (0 | 1, _) | (2, 0 | 1) => Some(8),
                (2, 2) => Some(11),
                _ => Some(12),
            },
            "cri-o" | "crio" | "CRI-O" => match (major, minor) {
                (0, _) => None,
                (1, 0..=33) => Some(8),
                _ => Some(10),
            },
            _ => None,
        }
    }

    /// The generation, if the version tells.
    pub fn generation(&self) -> Option<Generation> {
        self.nri_minor().map(|minor| {
            if minor >= 10 {
                Generation::WithValidation
            } else {
                Generation::WithoutValidation
            }
        })
    }

    /// Whether the accept loop is known to be serial, which the fence rests on: read in the
    /// sources of NRI 0.6 to 0.12 (`acceptPluginConnections`), and tested for each in the interop
    /// matrix. CRI-O uses the same loop; it holds no lock of its own from the end of a Synchronize
    /// until the plugin is in the list, so a request can pass in between, but the next connection
    /// is accepted only after that: an accepted fence proves the place in the list there, too.
    pub fn accepts_serially(&self) -> bool {
        self.nri_minor()
            .is_some_and(|minor| (6..=12).contains(&minor))
    }

    /// Whether the runtime removes a sandbox that a plugin refused. containerd before 2.2.6, and
    /// 2.3 before 2.3.3, leaves a record behind, and its next start can be fatal after many.
    pub fn cleans_up_refused_sandboxes(&self) -> bool {
        match (self.name.as_str(), self.parsed_version()) {
            ("containerd", Some((2, 2, patch))) => patch >= 6,
            ("containerd", Some((2, 3, patch))) => patch >= 3,
            ("containerd", Some(version)) => version >= (2, 4, 0),
            ("cri-o" | "crio" | "CRI-O", _) => true,
            _ => false,
        }
    }
}

/// "v2.3.4-rc.1+git" → (2, 3, 4). A pre-release counts as its release's predecessor's last patch
/// would: 2.3.0-beta.2 is read as 2.3.0, which has what the beta has.
fn parse_version(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.trim().trim_start_matches('v');
    let numeric = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .map_or(text, |end| &text[..end]);
    let mut parts = numeric.split('.').map(str::parse);
    let major = parts.next()?.ok()?;
    let minor = parts.next()?.ok()?;
    let patch = parts.next().and_then(Result::ok).unwrap_or(0);
    Some((major, minor, patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn containerd(version: &str) -> RuntimeIdentity {
        RuntimeIdentity {
            name: "containerd".into(),
            version: version.into(),
            nri_version: String::new(),
        }
    }

    #[test]
    fn the_mask_has_no_event_that_the_runtime_does_not_know() {
        assert_eq!(Generation::WithoutValidation.mask(), 0b1101);
        assert_eq!(Generation::WithValidation.mask(), 1 << 13 | 0b101);
    }

    #[test]
    fn versions_as_runtimes_print_them() {
        assert_eq!(containerd("v2.3.4").nri_minor(), Some(12));
        assert_eq!(containerd("2.2.7-1~deb13").nri_minor(), Some(11));
        assert_eq!(containerd("1.7.29").nri_minor(), Some(8));
        assert_eq!(containerd("v2.4.0-beta.1").nri_minor(), Some(12));
        assert_eq!(containerd("unknown").generation(), None);
        let mut told = containerd("v9.9.9");
        told.nri_version = "v0.13.1".into();
        assert_eq!(told.nri_minor(), Some(13));
        assert!(!told.accepts_serially());
    }

    #[test]
    fn runtimes_that_leak_refused_sandboxes() {
        for (version, cleans) in [
            ("v1.7.30", false),
            ("v2.1.5", false),
            ("v2.2.5", false),
            ("v2.2.6", true),
            ("v2.3.2", false),
            ("v2.3.3", true),
            ("v2.4.0", true),
            ("", false),
        ] {
            assert_eq!(
                containerd(version).cleans_up_refused_sandboxes(),
                cleans,
                "{version}"
            );
        }
    }
}
