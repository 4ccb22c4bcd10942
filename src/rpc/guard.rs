//! What stands between an untrusted peer and the ttrpc server: one connection's bytes, checked
//! frame by frame before ttrpc sees them.
//!
//! ttrpc-rust allocates up to 4 MiB from a frame's header, answers every malformed frame, starts a
//! task for each request, and never closes an idle connection. Here a frame must have a sane
//! header, be small and be complete in time, and requests in flight are counted and bounded. This
//! file knows ttrpc's frame header and nothing of our services.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until};

/// Largest frame accepted. A Register with 64 rules of ordinary size has a few kilobytes.
pub const MAX_FRAME: u32 = 256 << 10;
/// A first frame must begin, and any frame must be complete, within this time.
const FRAME_TIME: Duration = Duration::from_secs(10);
/// Requests of one connection that may wait for their answer; more are left in the socket.
const MAX_IN_FLIGHT: usize = 32;

const HEADER: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 3;
const REMOTE_CLOSED: u8 = 1;

/// What the accept loop knows of a connection while it lives.
#[derive(Debug, Default)]
pub struct Activity {
    /// Requests and streams without an answer yet.
    in_flight: AtomicUsize,
    /// Milliseconds since the listener's epoch of the last byte in either direction.
    last_used: AtomicU64,
    evict: Notify,
}

impl Activity {
    /// Nothing is asked or streamed right now, so that closing it costs the peer a reconnect only.
    pub fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
    }

    /// Milliseconds on the listener's clock when it was last used.
    pub fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }

    /// Closes the connection, to make room for a newer one.
    pub fn evict(&self) {
        self.evict.notify_one();
    }
}

/// Follows frame boundaries in a byte stream.
#[derive(Debug, Default)]
struct Frames {
    header: [u8; HEADER],
    have: usize,
    body_left: u32,
}

#[derive(Debug, Clone, Copy)]
struct Header {
    length: u32,
    stream_id: u32,
    kind: u8,
    flags: u8,
}

impl Frames {
    /// Calls `seen` for each header completed by `bytes`.
    fn advance(
        &mut self,
        mut bytes: &[u8],
        mut seen: impl FnMut(Header) -> io::Result<()>,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.body_left > 0 {
                let skip = bytes.len().min(self.body_left as usize);
                self.body_left -= skip as u32;
                bytes = &bytes[skip..];
                continue;
            }
            let take = bytes.len().min(HEADER - self.have);
            self.header[self.have..self.have + take].copy_from_slice(&bytes[..take]);
            self.have += take;
            bytes = &bytes[take..];
            if self.have == HEADER {
                let h = &self.header;
                let header = Header {
                    length: u32::from_be_bytes([h[0], h[1], h[2], h[3]]),
                    stream_id: u32::from_be_bytes([h[4], h[5], h[6], h[7]]),
                    kind: h[8],
                    flags: h[9],
                };
                self.have = 0;
                self.body_left = header.length;
                seen(header)?;
            }
        }
        Ok(())
    }

    fn at_boundary(&self) -> bool {
        self.have == 0 && self.body_left == 0
    }
}

/// A connection that ttrpc may be given.
pub struct Guarded {
    stream: UnixStream,
    incoming: Frames,
    outgoing: Frames,
    /// A peer that has not yet sent a byte, or is in the middle of a frame, has until `deadline`.
    seen_any: bool,
    deadline: Pin<Box<Sleep>>,
    /// The reader, while it waits for answers to go out.
    held_back: Option<Waker>,
    activity: Arc<Activity>,
    epoch: Instant,
    evicted: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
    /// Dropped with the connection.
    _open: Box<dyn Send + Sync>,
}

impl Guarded {
    /// Guards `stream`; `open` is dropped when the connection ends. `epoch` is the zero of
    /// [`Activity::last_used`].
    pub fn new(
        stream: UnixStream,
        activity: Arc<Activity>,
        epoch: Instant,
        open: impl Send + Sync + 'static,
    ) -> Self {
        let watched = activity.clone();
        let guarded = Self {
            stream,
            incoming: Frames::default(),
            outgoing: Frames::default(),
            seen_any: false,
            deadline: Box::pin(sleep_until(Instant::now() + FRAME_TIME)),
            held_back: None,
            activity,
            epoch,
            evicted: Box::pin(async move { watched.evict.notified().await }),
            _open: Box::new(open),
        };
        guarded.touch();
        guarded
    }

    fn touch(&self) {
        let now = self.epoch.elapsed().as_millis() as u64;
        self.activity.last_used.store(now, Ordering::Relaxed);
    }

    fn inspect_incoming(&mut self, bytes: &[u8]) -> io::Result<()> {
        let activity = &self.activity;
        let began = self.incoming.at_boundary() && !bytes.is_empty();
        self.incoming.advance(bytes, |header| {
            if header.length > MAX_FRAME {
                return Err(refused(format!(
                    "frame of {} bytes, at most {MAX_FRAME} are accepted",
                    header.length
                )));
            }
            if header.stream_id % 2 == 0 || !matches!(header.kind, REQUEST | DATA) {
                return Err(refused("not a ttrpc request".to_owned()));
            }
            if header.kind == REQUEST {
                activity.in_flight.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        })?;
        if began && !self.incoming.at_boundary() {
            self.deadline.as_mut().reset(Instant::now() + FRAME_TIME);
        }
        self.seen_any |= !bytes.is_empty();
        self.touch();
        Ok(())
    }

    fn inspect_outgoing(&mut self, bytes: &[u8]) {
        let activity = &self.activity;
        let outcome = self.outgoing.advance(bytes, |header| {
            let ends = header.kind == RESPONSE
                || (header.kind == DATA && header.flags & REMOTE_CLOSED != 0);
            if ends {
                // An error that answers a malformed frame has no request to it.
                let _ = activity.in_flight.fetch_update(
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                    |count| count.checked_sub(1),
                );
            }
            Ok(())
        });
        debug_assert!(outcome.is_ok(), "nothing is refused in this direction");
        self.touch();
        if let Some(reader) = self.held_back.take() {
            reader.wake();
        }
    }
}

fn refused(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.evicted.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(refused("closed to make room".to_owned())));
        }
        let in_flight = this.activity.in_flight.load(Ordering::Relaxed);
        if this.incoming.at_boundary() && in_flight >= MAX_IN_FLIGHT {
            this.held_back = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Pending => {
                let waiting = !this.seen_any || !this.incoming.at_boundary();
                if waiting && this.deadline.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "no complete request in time",
                    )));
                }
                Poll::Pending
            }
            Poll::Ready(Ok(())) => {
                this.inspect_incoming(&buf.filled()[before..])?;
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, buf) {
            Poll::Ready(Ok(written)) => {
                self.inspect_outgoing(&buf[..written]);
                Poll::Ready(Ok(written))
            }
            other => other,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn header(length: u32, stream_id: u32, kind: u8) -> Vec<u8> {
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend_from_slice(&stream_id.to_be_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        bytes
    }

    fn guarded() -> (Guarded, UnixStream, Arc<Activity>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let activity = Arc::new(Activity::default());
        (
            Guarded::new(ours, activity.clone(), Instant::now(), ()),
            theirs,
            activity,
        )
    }

    #[tokio::test]
    async fn zeros_and_huge_frames_end_the_connection() {
        for bytes in [
            vec![0; 64],
            header(MAX_FRAME + 1, 1, REQUEST),
            header(0, 1, 9),
        ] {
            let (mut ours, mut theirs, _) = guarded();
            theirs.write_all(&bytes).await.unwrap();
            let mut buf = vec![0; 64];
            let error = ours.read_exact(&mut buf).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_and_half_a_frame_run_out_of_time() {
        let (mut ours, _theirs, _) = guarded();
        let error = ours.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let (mut ours, mut theirs, _) = guarded();
        theirs.write_all(&header(10, 1, REQUEST)).await.unwrap();
        let mut buf = vec![0; 20];
        let error = ours.read_exact(&mut buf).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn requests_beyond_the_bound_wait_for_answers() {
        let (ours, mut theirs, activity) = guarded();
        let (mut read, mut write) = tokio::io::split(ours);
        for request in 0..=MAX_IN_FLIGHT as u32 {
            theirs
                .write_all(&header(0, request * 2 + 1, REQUEST))
                .await
                .unwrap();
        }
        let mut frame = [0; HEADER];
        for _ in 0..MAX_IN_FLIGHT {
            read.read_exact(&mut frame).await.unwrap();
        }
        assert!(!activity.is_idle());
        let last = tokio::spawn(async move { read.read_exact(&mut frame).await.map(|_| ()) });
        tokio::task::yield_now().await;
        assert!(!last.is_finished());
        write.write_all(&header(0, 1, RESPONSE)).await.unwrap();
        last.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_evicted_connection_ends() {
        let (mut ours, _theirs, activity) = guarded();
        activity.evict();
        assert!(ours.read_u8().await.is_err());
    }
}
