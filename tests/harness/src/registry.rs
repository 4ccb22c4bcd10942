//! The Registry service as a plugin's own client calls it: what the command line cannot say.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_proto::lease::registry_ttrpc::RegistryClient;
use tokio::net::UnixStream;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;

/// Longer than any registration should take.
const PATIENCE: Duration = Duration::from_secs(20);

/// One registration on a connection of its own. An error is the daemon's status.
pub fn register(run_dir: &Path, request: &RegisterRequest) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = connect(run_dir).await?;
        register_on(&client, request).await
    })
}

/// So many clients, each with a connection of its own, registering one after the other until
/// `until_stopped` is set. Returns how many registrations were acknowledged and how many were not.
pub fn register_storm(
    run_dir: &Path,
    requests: Vec<RegisterRequest>,
    until_stopped: &std::sync::atomic::AtomicBool,
) -> Result<(u64, u64)> {
    use std::sync::atomic::Ordering;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut clients = vec![];
        for request in requests {
            clients.push((connect(run_dir).await?, request));
        }
        let all = clients.iter().map(|(client, request)| async move {
            let (mut acknowledged, mut refused) = (0_u64, 0_u64);
            while !until_stopped.load(Ordering::Relaxed) {
                match register_on(client, request).await {
                    Ok(()) => acknowledged += 1,
                    Err(_) => {
                        refused += 1;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
            (acknowledged, refused)
        });
        let counts = join_all(all.collect()).await;
        Ok(counts
            .into_iter()
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
    })
}

async fn join_all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        let mut all_ready = true;
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => all_ready = false,
                }
            }
        }
        match all_ready {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

async fn connect(run_dir: &Path) -> Result<RegistryClient> {
    let path = run_dir.join("registry.sock");
    let stream = UnixStream::connect(&path)
        .await
        .with_context(|| format!("connecting to {}", path.display()))?;
    Ok(RegistryClient::new(Client::new(Socket::from(stream))))
}

async fn register_on(client: &RegistryClient, request: &RegisterRequest) -> Result<()> {
    let context = ttrpc::context::with_duration(PATIENCE);
    client.register(context, request).await?;
    Ok(())
}
