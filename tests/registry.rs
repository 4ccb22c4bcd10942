//! Bad requests on both sockets: each is refused with a code and a text that names the field and
//! the remedy, changes nothing, and the next good request is answered.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use node::{Node, limit, millis, refusal, registration, seconds, subject};
use nri_lease_proto::lease::admin::*;
use nri_lease_proto::lease::registry::*;
use nri_lease_proto::lease::types::{EventMask, Operation, Scope, ScopeRule, Subject};
use nri_lease_proto::protobuf::{EnumOrUnknown, MessageField};
use nri_lease_proto::ttrpc::Code;

/// What is wrong, the request, the code, and what the text must say.
type Case = (&'static str, RegisterRequest, Code, &'static [&'static str]);

fn scoped(rules: Vec<ScopeRule>) -> RegisterRequest {
    RegisterRequest {
        scope: MessageField::some(Scope {
            rules,
            ..Default::default()
        }),
        ..registration("p", 60)
    }
}

fn with(change: impl FnOnce(&mut RegisterRequest)) -> RegisterRequest {
    let mut request = registration("p", 60);
    change(&mut request);
    request
}

fn namespaces(glob: &str) -> ScopeRule {
    ScopeRule {
        namespaces: vec![glob.to_owned()],
        ..Default::default()
    }
}

fn bad_registrations() -> Vec<Case> {
    use Code::{FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED};
    let mask = |mask| {
        MessageField::some(EventMask {
            mask,
            ..Default::default()
        })
    };
    vec![
        (
            "empty name",
            registration("", 60),
            INVALID_ARGUMENT,
            &["plugin", "empty", "dra.net"],
        ),
        (
            "bad name",
            registration("dra/net", 60),
            INVALID_ARGUMENT,
            &["plugin", "'/'", "[a-zA-Z0-9_.+-]"],
        ),
        (
            "not ASCII",
            registration("drä", 60),
            INVALID_ARGUMENT,
            &["plugin", "'ä'"],
        ),
        (
            "NUL in the name",
            registration("a\0b", 60),
            INVALID_ARGUMENT,
            &["plugin", "'\\0'"],
        ),
        (
            "129 bytes",
            registration(&"n".repeat(129), 60),
            INVALID_ARGUMENT,
            &["129 bytes", "at most 128"],
        ),
        (
            "huge name",
            registration(&"n".repeat(200_000), 60),
            INVALID_ARGUMENT,
            &["200000 bytes", "at most 128"],
        ),
        (
            "ttl 0",
            registration("p", 0),
            INVALID_ARGUMENT,
            &["ttl is 0", "leave it out"],
        ),
        (
            "ttl below the minimum",
            registration("p", 4),
            INVALID_ARGUMENT,
            &["ttl of 4s", "5s to 86400s"],
        ),
        (
            "ttl above the maximum",
            registration("p", 86_401),
            INVALID_ARGUMENT,
            &["ttl of 86401s", "5s to 86400s"],
        ),
        (
            "ttl of ages",
            registration("p", i64::MAX / 1000),
            INVALID_ARGUMENT,
            &["ttl", "365 days"],
        ),
        (
            "negative ttl",
            registration("p", -5),
            INVALID_ARGUMENT,
            &["ttl is negative", "give a positive duration"],
        ),
        (
            "malformed ttl",
            with(|r| r.ttl.mut_or_insert_default().nanos = 2_000_000_000),
            INVALID_ARGUMENT,
            &["ttl", "malformed"],
        ),
        (
            "unknown mode",
            with(|r| r.mode = EnumOrUnknown::from_i32(7)),
            INVALID_ARGUMENT,
            &["mode 7", "MODE_ENFORCE", "MODE_AUDIT"],
        ),
        (
            "index \"1\"",
            with(|r| r.index = "1".into()),
            INVALID_ARGUMENT,
            &["index \"1\"", "two digits", "\"10\""],
        ),
        (
            "index \"100\"",
            with(|r| r.index = "100".into()),
            INVALID_ARGUMENT,
            &["index \"100\""],
        ),
        (
            "index \"٠١\"",
            with(|r| r.index = "٠١".into()),
            INVALID_ARGUMENT,
            &["index", "two digits"],
        ),
        // StopPodSandbox only.
        (
            "deaf",
            with(|r| r.events = mask(1 << 1)),
            FAILED_PRECONDITION,
            &["events mask 0x2", "RunPodSandbox", "subscribe"],
        ),
        (
            "65 rules",
            scoped(vec![namespaces("a"); 65]),
            RESOURCE_EXHAUSTED,
            &["65", "64"],
        ),
        (
            "empty rule",
            scoped(vec![ScopeRule::new()]),
            INVALID_ARGUMENT,
            &["rules[1]", "empty"],
        ),
        (
            "bad glob",
            scoped(vec![namespaces("a"), namespaces("[a")]),
            INVALID_ARGUMENT,
            &["rules[2]", "namespaces", "[a"],
        ),
        (
            "bad selector",
            scoped(vec![ScopeRule {
                pod_labels: "app in (a".into(),
                ..Default::default()
            }]),
            INVALID_ARGUMENT,
            &["rules[1]", "pod_labels"],
        ),
        (
            "bad operation",
            scoped(vec![ScopeRule {
                operations: vec![EnumOrUnknown::from_i32(9)],
                ..namespaces("a")
            }]),
            INVALID_ARGUMENT,
            &["rules[1].operations", "9", "OPERATION_SANDBOX"],
        ),
        (
            "never for a sandbox",
            scoped(vec![ScopeRule {
                containers: vec!["c".into()],
                operations: vec![Operation::OPERATION_SANDBOX.into()],
                ..Default::default()
            }]),
            INVALID_ARGUMENT,
            &["rules[1]"],
        ),
        (
            "subject without pid",
            with(|r| r.subject = subject(0)),
            INVALID_ARGUMENT,
            &["subject.pid is 0", "leave subject out"],
        ),
        (
            "subject that cannot be",
            with(|r| r.subject = subject(u32::MAX)),
            NOT_FOUND,
            &["subject", "4294967295"],
        ),
        (
            "subject of another time",
            with(|r| {
                r.subject = MessageField::some(Subject {
                    pid: std::process::id(),
                    start_time: 1,
                    ..Default::default()
                })
            }),
            NOT_FOUND,
            &["started at 1", "another process"],
        ),
    ]
}

#[tokio::test]
async fn a_bad_registration_is_refused_with_the_field_and_the_remedy() {
    let node = Node::start("").await;
    let registry = node.registry().await;
    for (what, request, code, says) in bad_registrations() {
        let (found, text) = refusal(registry.register(limit(), &request).await);
        assert_eq!(found, code, "{what}: {text}");
        for part in says {
            assert!(text.contains(part), "{what}: no {part:?} in {text:?}");
        }
        assert!(text.len() < 1024, "{what}: {} bytes of text", text.len());
    }
    assert!(node.leases().await.is_empty());
    node.registers("p").await;
    node.becomes_idle().await;
}

#[tokio::test]
async fn a_subject_that_has_ended_is_not_found() {
    let node = Node::start("").await;
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    let request = with(|r| r.subject = subject(pid));
    let (code, text) = refusal(node.registry().await.register(limit(), &request).await);
    assert_eq!(code, Code::NOT_FOUND, "{text}");
    assert!(text.contains(&format!("process {pid} is gone")), "{text}");
}

/// Its pid is still there and its start time is still true, but it will never serve again.
#[tokio::test]
async fn a_subject_that_is_a_zombie_holds_nothing() {
    let node = Node::start("").await;
    let mut zombie = std::process::Command::new("true").spawn().unwrap();
    let stat = format!("/proc/{}/stat", zombie.id());
    node::until("a zombie", async || {
        std::fs::read_to_string(&stat).unwrap().contains(") Z ")
    })
    .await;
    let request = with(|r| r.subject = subject(zombie.id()));
    match node.registry().await.register(limit(), &request).await {
        Err(refused) => assert!(refused.to_string().contains("gone"), "{refused}"),
        Ok(_) => {
            node::until("the holder to be dropped", async || {
                node.leases().await[0].holders.is_empty()
            })
            .await;
        }
    }
    zombie.wait().unwrap();
}

#[tokio::test]
async fn limits_are_named_when_they_are_reached() {
    let node = Node::start("[leases]\nmax_leases = 2\nmax_pins = 2\nmax_holders = 1\n").await;
    let registry = node.registry().await;
    node.registers("a").await;
    node.registers("b").await;
    let (code, text) = refusal(registry.register(limit(), &registration("c", 60)).await);
    assert_eq!(code, Code::RESOURCE_EXHAUSTED);
    assert!(
        text.contains("limit of 2") && text.contains("max_leases"),
        "{text}"
    );
    // A lease that is there can be registered again.
    node.registers("b").await;

    let mut second = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .unwrap();
    let mut request = registration("a", 60);
    request.subject = subject(second.id());
    let (code, text) = refusal(registry.register(limit(), &request).await);
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(code, Code::RESOURCE_EXHAUSTED);
    assert!(
        text.contains("holders") && text.contains("limit of 1"),
        "{text}"
    );

    let pin = |uid: &str| PinRequest {
        plugin: "a".into(),
        pod_uid: uid.into(),
        ..Default::default()
    };
    for uid in ["u1", "u2"] {
        registry.pin(limit(), &pin(uid)).await.unwrap();
    }
    let (code, text) = refusal(registry.pin(limit(), &pin("u3")).await);
    assert_eq!(code, Code::RESOURCE_EXHAUSTED);
    assert!(text.contains("limit of 2"), "{text}");
}

#[tokio::test]
async fn what_is_not_there_is_not_found_and_says_what_to_do() {
    let node = Node::start("").await;
    let registry = node.registry().await;
    let renew = RenewRequest {
        plugin: "p".into(),
        ..Default::default()
    };
    let (code, text) = refusal(registry.renew(limit(), &renew).await);
    assert_eq!(code, Code::NOT_FOUND);
    assert!(text.contains("register again"), "{text}");

    let mut stream = registry.keep_alive(limit()).await.unwrap();
    stream.send(&renew).await.unwrap();
    let answer = stream.recv().await.unwrap();
    assert_eq!(answer.error_code, Code::NOT_FOUND as i32);
    assert!(answer.error_message.contains("register again"), "{answer}");
    // The stream goes on.
    node.registers("p").await;
    stream.send(&renew).await.unwrap();
    let answer = stream.recv().await.unwrap();
    assert_eq!((answer.error_code, answer.generation), (0, 1), "{answer}");
    stream.close_send().await.unwrap();
    assert_eq!(node.lease_names().await, ["p"]);

    let release = ReleaseRequest {
        plugin: "other".into(),
        ..Default::default()
    };
    let (code, _) = refusal(registry.release(limit(), &release).await);
    assert_eq!(code, Code::NOT_FOUND);
    let pin = PinRequest {
        plugin: "p".into(),
        pod_uid: "a/b".into(),
        ..Default::default()
    };
    let (code, text) = refusal(registry.pin(limit(), &pin).await);
    assert_eq!(code, Code::INVALID_ARGUMENT);
    assert!(
        text.contains("pod_uid") && text.contains("metadata.uid"),
        "{text}"
    );
}

#[tokio::test]
async fn a_banned_name_is_refused_with_the_reason_until_the_ban_is_lifted() {
    let node = Node::start("").await;
    let admin = node.admin().await;
    let mut ban = SetBanRequest {
        plugin: "p".into(),
        duration: seconds(600),
        reason: "it corrupts pods".into(),
        ..Default::default()
    };
    admin.set_ban(limit(), &ban).await.unwrap();
    let registry = node.registry().await;
    let (code, text) = refusal(registry.register(limit(), &registration("p", 60)).await);
    assert_eq!(code, Code::FAILED_PRECONDITION);
    for part in ["banned", "it corrupts pods", "nri-lease unban p"] {
        assert!(text.contains(part), "{text}");
    }
    ban.duration = MessageField::none();
    admin.set_ban(limit(), &ban).await.unwrap();
    node.registers("p").await;
}

#[tokio::test]
async fn a_bad_admin_request_is_refused_with_the_field_and_the_remedy() {
    use Code::{INVALID_ARGUMENT, NOT_FOUND};
    let node = Node::start("").await;
    node.registers("p").await;
    let admin = node.admin().await;
    let plugin = || "p".to_owned();

    let revoke = |plugin: &str, ban, reason: &str| RevokeLeaseRequest {
        plugin: plugin.into(),
        ban,
        reason: reason.into(),
        ..Default::default()
    };
    let none = MessageField::none;
    let long = "r".repeat(257);
    for (request, code, says) in [
        (revoke("", none(), ""), INVALID_ARGUMENT, "plugin is empty"),
        (
            revoke("q", none(), ""),
            NOT_FOUND,
            "no lease of plugin \"q\"",
        ),
        (
            revoke("p", seconds(-1), "r"),
            INVALID_ARGUMENT,
            "ban is negative",
        ),
        (
            revoke("p", millis(10), "r"),
            INVALID_ARGUMENT,
            "1s to 31536000s",
        ),
        (
            revoke("p", seconds(60), &long),
            INVALID_ARGUMENT,
            "257 bytes, at most 256",
        ),
    ] {
        let (found, text) = refusal(admin.revoke_lease(limit(), &request).await);
        assert_eq!(found, code, "{text}");
        assert!(text.contains(says), "{text}");
    }
    // A revocation that is refused for its ban revokes nothing.
    assert_eq!(node.lease_names().await, ["p"]);

    let request = SetBanRequest {
        plugin: plugin(),
        duration: seconds(366 * 86_400),
        ..Default::default()
    };
    let (code, text) = refusal(admin.set_ban(limit(), &request).await);
    assert_eq!(code, INVALID_ARGUMENT);
    assert!(text.contains("31536000s"), "{text}");

    let pause = |duration, reason: &str| SetPauseRequest {
        duration,
        reason: reason.into(),
        ..Default::default()
    };
    for (request, says) in [
        (pause(seconds(60), ""), "reason is empty"),
        (pause(seconds(86_401), "r"), "1s to 86400s"),
        (pause(seconds(-1), "r"), "duration is negative"),
    ] {
        let (code, text) = refusal(admin.set_pause(limit(), &request).await);
        assert_eq!(code, INVALID_ARGUMENT, "{text}");
        assert!(text.contains(says), "{text}");
    }
    let (code, text) = refusal(admin.explain(limit(), &ExplainRequest::new()).await);
    assert_eq!(code, INVALID_ARGUMENT);
    assert!(text.contains("no pod is given"), "{text}");
    let request = GetLeaseRequest {
        plugin: "q".into(),
        ..Default::default()
    };
    let (code, text) = refusal(admin.get_lease(limit(), &request).await);
    assert_eq!(code, NOT_FOUND);
    // What to do about it, the command line says.
    assert!(text.contains("never registered, or has ended"), "{text}");
    assert_eq!(node.lease_names().await, ["p"]);
}
