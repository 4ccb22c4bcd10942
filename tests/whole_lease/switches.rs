//! What an admin has at 3 a.m.: pause and resume, audit mode, bans, revoke. All of it has an end,
//! survives a restart and can be seen.

use std::time::Instant;

use nix::sys::signal::Signal;
use nri_lease_sim::{ContainerSpec, PodSpec};

use super::node::{LIMIT, Node, QUICK, says, until, workload};

/// A node whose plugin `dra.net` is away.
async fn bereft(config: &str) -> Node {
    let node = Node::start(config).await;
    let plugin = node.required_plugin("dra.net", None, "10m").await;
    drop(plugin);
    node.wait_state("dra.net", "missing");
    node
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_lets_everything_pass_says_who_and_why_and_ends_in_time_across_a_restart() {
    let mut node = bereft(QUICK).await;
    node.refused(workload("before")).await;
    let began = Instant::now();
    node.done(&["pause", "--for", "4s", "--reason", "incident 7"]);
    let pod = node.starts(workload("during")).await;
    let status = node.json(&["status"]);
    assert_eq!(status["pause"]["reason"], "incident 7", "{status}");
    assert_eq!(status["pause"]["set_by_uid"], 0, "{status}");
    says(
        &node.done(&["status"]),
        &["PAUSED for ", "incident 7", "set by uid 0"],
    );

    node.restart_daemon().await;
    if began.elapsed().as_secs_f64() < 3.0 {
        node.starts(workload("after-the-restart")).await;
    }
    assert_eq!(node.json(&["status"])["pause"]["reason"], "incident 7");
    until("the pause to end", || {
        node.json(&["status"])["pause"].is_null()
    });
    let took = began.elapsed().as_secs_f64();
    assert!((4.0..6.0).contains(&took), "it took {took} s");
    node.refused(workload("afterwards")).await;
    node.container_refused(&pod, ContainerSpec::new("second"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resuming_ends_a_pause_early_and_a_pause_needs_a_reason_and_an_end() {
    let node = bereft(QUICK).await;
    node.done(&["pause", "--for", "1h", "--reason", "try"]);
    node.starts(workload("during")).await;
    says(&node.done(&["resume"]), &["on again"]);
    node.refused(workload("afterwards")).await;
    says(&node.done(&["resume"]), &["was not paused"]);
    assert_eq!(node.failed(&["pause", "--for", "1h"]).0, 2);
    assert_eq!(node.failed(&["pause", "--reason", "x"]).0, 2);
    let (code, said) = node.failed(&["pause", "--for", "25h", "--reason", "x"]);
    assert_eq!(code, 2);
    says(&said, &["pause duration", "86400s"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_mode_refuses_nothing_and_lists_what_would_have_been() {
    let audit = format!("{QUICK}[enforcement]\nmode = 'audit'\n");
    let mut node = bereft(&audit).await;
    node.starts(workload("web")).await;
    // It would start in any case, so that it is no would-be rejection.
    let exempt = PodSpec::new("kube-system", "etcd");
    node.starts(exempt.annotation("kubernetes.io/config.source", "file"))
        .await;
    let listed = node.json(&["audit"]);
    let would = listed["would_reject"].as_array().expect("a list");
    let subjects: Vec<_> = would
        .iter()
        .map(|decision| (&decision["operation"], &decision["pod"]["name"]))
        .collect();
    assert_eq!(subjects.len(), 2, "{listed}");
    for (decision, operation) in would.iter().zip(["container", "sandbox"]) {
        assert_eq!(decision["operation"], operation, "newest first");
        assert_eq!(decision["pod"]["name"], "web");
        assert_eq!(decision["plugin"], "dra.net");
        let reason = decision["reason"].as_str().expect("a reason");
        says(reason, &["audit mode: required NRI plugin \"dra.net\""]);
    }
    let unvetted = listed["sandboxes"].as_array().expect("a list");
    assert!(
        unvetted.iter().any(|one| one["pod"]["name"] == "web"),
        "{listed}"
    );
    let status = node.json(&["status"]);
    assert_eq!(status["mode"], "audit");
    assert_eq!(status["would_reject_total"], 2);
    assert_eq!(status["rejected_total"], 0);

    // SIGHUP turns it into enforcement.
    node.configure(QUICK);
    node.signal_daemon(Signal::SIGHUP);
    until("the new mode", || {
        node.json(&["status"])["mode"] == "enforce"
    });
    node.refused(workload("next")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_mode_of_one_lease_leaves_the_others_enforced() {
    let node = Node::start(QUICK).await;
    let plugin = node.plugin("dra.net", None).await;
    let pid = plugin.pid();
    node.register_with("dra.net", pid, "10m", &["--mode", "audit"]);
    let other = node.required_plugin("cpu", None, "10m").await;
    drop(plugin);
    node.wait_state("dra.net", "missing");
    node.starts(workload("web")).await;
    assert_eq!(node.lease("dra.net").expect("a lease")["mode"], "audit");
    let listed = node.json(&["audit"]);
    assert_eq!(listed["would_reject"][0]["plugin"], "dra.net", "{listed}");
    drop(other);
    node.wait_state("cpu", "missing");
    let refusal = node.refused(workload("next")).await;
    says(
        &refusal,
        &["required NRI plugin \"cpu\"", "also missing: dra.net"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ban_keeps_a_plugin_out_with_the_reason_until_it_ends_or_is_lifted() {
    let mut node = Node::start(QUICK).await;
    let plugin = node.required_plugin("dra.net", None, "10m").await;
    let pid = plugin.pid().to_string();
    let register = ["register", "dra.net", "--pid", &pid, "--once"];
    node.done(&[
        "revoke",
        "dra.net",
        "--ban",
        "10m",
        "--reason",
        "broken release",
    ]);
    assert!(node.lease("dra.net").is_none());
    let (code, said) = node.failed(&register);
    assert_eq!(code, 1, "{said}");
    says(
        &said,
        &[
            "banned for another",
            "broken release",
            "nri-lease unban dra.net",
        ],
    );
    node.restart_daemon().await;
    assert_eq!(node.failed(&register).0, 1, "it survives a restart");
    let bans = node.json(&["bans"]);
    assert_eq!(bans["bans"][0]["plugin"], "dra.net", "{bans}");
    assert_eq!(bans["bans"][0]["reason"], "broken release", "{bans}");
    assert_eq!(node.json(&["status"])["bans"], 1);
    // The refusal's own command works.
    node.done(&["unban", "dra.net"]);
    node.done(&register);
    assert_eq!(node.failed(&["unban", "dra.net"]).0, 3);

    // A ban alone leaves the lease that lives, and has an end.
    node.done(&["ban", "dra.net", "2s"]);
    assert!(node.lease("dra.net").is_some());
    assert_eq!(node.failed(&register).0, 1);
    until("the ban to end", || node.json(&["status"])["bans"] == 0);
    node.done(&register);
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_and_inspect_tell_the_story_of_a_refusal() {
    let node = Node::start(QUICK).await;
    let plugin = node.required_plugin("dra.net", None, "10m").await;
    let pod = node.starts(workload("web")).await;
    let pid = plugin.pid();
    drop(plugin);
    node.wait_state("dra.net", "missing");
    let refusal = node
        .container_refused(&pod, ContainerSpec::new("second"))
        .await;
    let explained = node.json(&["explain", "--pod", "default/web", "--container", "second"]);
    let decision = &explained["decisions"][0];
    assert_eq!(decision["verdict"], "reject");
    says(&refusal, &[&format!("holder pid {pid} gone since")]);
    let reason = decision["reason"].as_str().expect("a reason");
    says(reason, &[&format!("holder pid {pid} gone since")]);
    let steps = decision["steps"].as_array().expect("steps");
    let step = format!("missing: holder pid {pid} gone since");
    assert!(
        steps
            .iter()
            .any(|one| one.as_str().is_some_and(|one| one.contains(&step))),
        "{steps:?}"
    );
    let inspected = node.json(&["inspect", "dra.net"]);
    assert_eq!(
        inspected["decisions"][0]["verdict"], "reject",
        "{inspected}"
    );
    says(
        &node.done(&["inspect", "dra.net"]),
        &["Last decisions", "reject"],
    );
    let (code, said) = node.failed(&["explain", "--pod", "default/nobody"]);
    assert_eq!(code, 3);
    says(&said, &["no runtime has told of such a pod"]);
    // Every override that a refusal names works.
    node.done(&["revoke", "dra.net"]);
    node.container_starts(&pod, ContainerSpec::new("second"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_switched_is_told_to_watchers() {
    let node = Node::start(QUICK).await;
    let watch = node.cli_process(&["-o", "json", "watch"]);
    // Watching begins when the first event is seen; one may pass before.
    let mut opened = false;
    for _ in 0..200 {
        node.done(&["ban", "probe", "10m"]);
        let probe = |line: &str| line.contains("\"banned\"");
        let wait = std::time::Duration::from_millis(100);
        if watch.wait_for_line(wait, probe).await.is_some() {
            opened = true;
            break;
        }
    }
    assert!(opened, "{:?}", watch.output());
    node.done(&["unban", "probe"]);
    node.done(&["pin", "dra.net", "uid-1"]);
    node.done(&["unpin", "dra.net", "uid-1"]);
    node.done(&["pause", "--for", "1h", "--reason", "why"]);
    node.done(&["resume"]);
    for kind in ["unbanned", "pinned", "unpinned", "paused", "resumed"] {
        let told = format!("\"{kind}\"");
        let seen = watch
            .wait_for_line(LIMIT, |line| line.contains(&told))
            .await;
        assert!(seen.is_some(), "no {kind} in {:#?}", watch.output());
    }
}
