//! NRI's own runtime side against NRI's own plugin stub, every version with every other.

use std::process::ExitCode;
use std::time::Duration;

use nri_lease_harness::adaptation::{Adaptation, AdaptationOptions, container_id, pod_id};
use nri_lease_harness::plugin::{Fault, Nri, Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::scratch::Scratch;
use nri_lease_harness::{Result, ensure};

fn main() -> ExitCode {
    let mut tests = vec![];
    for runtime in Nri::ALL {
        for plugin in Nri::ALL {
            tests.push(Test::new(
                format!(
                    "{}::{}_plugin_processes_pods",
                    runtime.folder(),
                    plugin.folder()
                ),
                move |_| plugin_processes_pods(runtime, plugin),
            ));
        }
        tests.push(Test::new(
            format!("{}::late_plugin_is_skipped_and_says_so", runtime.folder()),
            move |_| late_plugin(runtime),
        ));
        tests.push(Test::new(
            format!("{}::faults_strike_once", runtime.folder()),
            move |_| faults(runtime),
        ));
        tests.push(Test::new(
            format!("{}::large_synchronize_arrives_whole", runtime.folder()),
            move |_| large_synchronize(runtime),
        ));
        tests.push(Test::new(
            format!("{}::blocked_synchronisation_waits", runtime.folder()),
            move |_| blocked(runtime),
        ));
    }
    runner::main(2, tests)
}

fn start(nri: Nri, scratch: &Scratch) -> Result<Adaptation> {
    Adaptation::start(&AdaptationOptions::new(nri), &scratch.join("nri.sock"))
}

fn options(nri: Nri) -> PluginOptions {
    PluginOptions {
        nri,
        ..PluginOptions::named("test.plugin")
    }
}

fn plugin_processes_pods(runtime: Nri, nri: Nri) -> Result<()> {
    let scratch = Scratch::new()?;
    let adaptation = start(runtime, &scratch)?;
    let plugin = Plugin::start_synchronized(&options(nri), adaptation.socket(), scratch.path())?;
    adaptation.run_pod("one")?;
    adaptation.create_container("one", "main")?;
    ensure!(plugin.processed_pod(&pod_id("one"))?);
    ensure!(plugin.processed_container(&container_id("one", "main"))?);
    Ok(())
}

fn late_plugin(nri: Nri) -> Result<()> {
    let scratch = Scratch::new()?;
    let mut runtime = AdaptationOptions::new(nri);
    runtime.request_timeout = Duration::from_millis(200);
    let adaptation = Adaptation::start(&runtime, &scratch.join("nri.sock"))?;
    let plugin = Plugin::start_synchronized(
        &PluginOptions {
            reconnect: false,
            ..options(nri)
        },
        adaptation.socket(),
        scratch.path(),
    )?;
    plugin.fault("run_pod_sandbox", &Fault::Sleep(Duration::from_millis(600)))?;
    adaptation.run_pod("one")?;
    plugin.wait_disconnected()?;
    nri_lease_harness::wait::wait_until("the late entry", Duration::from_secs(10), || {
        plugin
            .record()
            .is_ok_and(|r| r.iter().any(|e| e.event == "run_pod_sandbox" && e.late))
    })?;
    ensure!(!plugin.processed_pod(&pod_id("one"))?);
    Ok(())
}

fn faults(nri: Nri) -> Result<()> {
    let scratch = Scratch::new()?;
    let adaptation = start(nri, &scratch)?;
    let mut plugin =
        Plugin::start_synchronized(&options(nri), adaptation.socket(), scratch.path())?;

    plugin.fault("run_pod_sandbox", &Fault::Refuse("not today".into()))?;
    let refused = adaptation.run_pod("refused").map_err(|e| e.to_string());
    ensure!(
        refused.as_ref().is_err_and(|e| e.contains("not today")),
        "{refused:?}"
    );

    let again = Some(Duration::from_millis(50));
    plugin.fault(
        "create_container",
        &Fault::Disconnect {
            reconnect_after: again,
        },
    )?;
    adaptation.run_pod("one")?;
    adaptation.create_container("one", "cut-off")?;
    ensure!(!plugin.processed_container(&container_id("one", "cut-off"))?);
    ensure!(plugin.wait_synchronized()?.connections == 2);

    for fault in [Fault::Exit, Fault::Kill] {
        plugin.fault("create_container", &fault)?;
        adaptation.create_container("one", &format!("{fault:?}"))?;
        plugin.wait_ended()?;
        ensure!(!plugin.processed_container(&container_id("one", &format!("{fault:?}")))?);
        plugin = Plugin::start_synchronized(&options(nri), adaptation.socket(), scratch.path())?;
    }

    plugin.freeze();
    plugin.thaw();
    adaptation.create_container("one", "last")?;
    ensure!(plugin.processed_container(&container_id("one", "last"))?);
    Ok(())
}

fn large_synchronize(nri: Nri) -> Result<()> {
    let scratch = Scratch::new()?;
    let mut runtime = AdaptationOptions::new(nri);
    (runtime.pods, runtime.containers) = (500, 5_000);
    let adaptation = Adaptation::start(&runtime, &scratch.join("nri.sock"))?;
    let plugin = Plugin::start_synchronized(&options(nri), adaptation.socket(), scratch.path())?;
    let record = plugin.record()?;
    let whole = record
        .iter()
        .any(|e| e.event == "synchronize" && e.pods.len() == 500 && e.containers.len() == 5_000);
    ensure!(whole);
    Ok(())
}

fn blocked(nri: Nri) -> Result<()> {
    let scratch = Scratch::new()?;
    let adaptation = start(nri, &scratch)?;
    adaptation.block_plugin_sync()?;
    let plugin = Plugin::start(&options(nri), adaptation.socket(), scratch.path())?;
    nri_lease_harness::wait::wait_until("configured", Duration::from_secs(10), || {
        plugin.status().is_ok_and(|s| s.connected)
    })?;
    ensure!(!plugin.status()?.synchronized);
    adaptation.unblock_plugin_sync()?;
    plugin.wait_synchronized()?;
    Ok(())
}
