//! What stands between an untrusted peer and the ttrpc server: one connection's bytes, checked
//! frame by frame before ttrpc sees them.
//!
//! ttrpc-rust allocates up to 4 MiB from a frame's header, answers every malformed frame, starts a
//! task for each frame, and never closes an idle connection. Here a frame must have a sane header,
//! be small and be complete in time, and what waits for an answer is counted and bounded. This
//! file knows ttrpc's frame header and nothing of our services.

use std::collections::HashMap;
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
const MAX_REQUESTS: usize = 32;
/// Messages on streams that may wait for theirs, of all streams of one connection together. ttrpc
/// puts each into a task of its own, without a bound, while the stream's reader or the peer that
/// should read the answers is slow.
const MAX_MESSAGES: usize = 16;
/// Streams that the peer sends on, open at once on one connection: one KeepAlive a plugin.
const MAX_STREAMS: usize = 64;

const HEADER: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 3;
const REMOTE_CLOSED: u8 = 1;
/// On a request: the peer will send messages on the stream.
const REMOTE_OPEN: u8 = 2;

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

    /// As with a request that waits for its answer.
    #[cfg(test)]
    pub fn pretend_busy(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
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

/// What the peer waits for, or will have to read.
#[derive(Debug, Default)]
struct Unanswered {
    of_stream: HashMap<u32, Waiting>,
    /// Sums over `of_stream`.
    requests: usize,
    streams: usize,
    messages: usize,
}

#[derive(Debug, Default)]
struct Waiting {
    request: Option<Request>,
    messages: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    /// Has said everything; also one that is answered with a stream.
    Whole,
    /// Opened a stream to send on.
    Stream,
}

impl Unanswered {
    /// Nothing further is read until something is answered. A stream does not count as a request:
    /// it may live for ever, and its messages have to be read.
    fn is_full(&self) -> bool {
        self.requests >= MAX_REQUESTS || self.messages >= MAX_MESSAGES
    }

    fn received(&mut self, header: Header) -> io::Result<()> {
        if header.kind == DATA {
            // On a stream that is not open, too: ttrpc answers that with an error.
            self.of_stream.entry(header.stream_id).or_default().messages += 1;
            self.messages += 1;
            return Ok(());
        }
        let waiting = self.of_stream.entry(header.stream_id).or_default();
        if waiting.request.is_some() {
            let message = format!("stream {} is open already", header.stream_id);
            return Err(refused(message));
        }
        if header.flags & REMOTE_OPEN == 0 {
            waiting.request = Some(Request::Whole);
            self.requests += 1;
            return Ok(());
        }
        if self.streams >= MAX_STREAMS {
            let message = format!("more than {MAX_STREAMS} streams on one connection");
            return Err(refused(message));
        }
        waiting.request = Some(Request::Stream);
        self.streams += 1;
        Ok(())
    }

    fn sent(&mut self, header: Header) {
        let Some(waiting) = self.of_stream.get_mut(&header.stream_id) else {
            return;
        };
        let last =
            header.kind == RESPONSE || (header.kind == DATA && header.flags & REMOTE_CLOSED != 0);
        if last && let Some(request) = waiting.request {
            // Messages that its handler has not taken go unanswered.
            self.messages -= waiting.messages;
            match request {
                Request::Whole => self.requests -= 1,
                Request::Stream => self.streams -= 1,
            }
            self.of_stream.remove(&header.stream_id);
            return;
        }
        // A watch sends without having been sent anything.
        if waiting.messages > 0 {
            waiting.messages -= 1;
            self.messages -= 1;
        }
        if waiting.messages == 0 && waiting.request.is_none() {
            self.of_stream.remove(&header.stream_id);
        }
    }
}

/// A connection that ttrpc may be given.
pub struct Guarded {
    stream: UnixStream,
    incoming: Frames,
    outgoing: Frames,
    unanswered: Unanswered,
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
            unanswered: Unanswered::default(),
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
        let in_flight = self.unanswered.requests + self.unanswered.streams;
        self.activity.in_flight.store(in_flight, Ordering::Relaxed);
        let now = self.epoch.elapsed().as_millis() as u64;
        self.activity.last_used.store(now, Ordering::Relaxed);
    }

    fn inspect_incoming(&mut self, bytes: &[u8]) -> io::Result<()> {
        let unanswered = &mut self.unanswered;
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
            unanswered.received(header)
        })?;
        if began && !self.incoming.at_boundary() {
            self.deadline.as_mut().reset(Instant::now() + FRAME_TIME);
        }
        self.seen_any |= !bytes.is_empty();
        self.touch();
        Ok(())
    }

    fn inspect_outgoing(&mut self, bytes: &[u8]) {
        let unanswered = &mut self.unanswered;
        let outcome = self.outgoing.advance(bytes, |header| {
            unanswered.sent(header);
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
        if this.incoming.at_boundary() && this.unanswered.is_full() {
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
        for request in 0..=MAX_REQUESTS as u32 {
            theirs
                .write_all(&header(0, request * 2 + 1, REQUEST))
                .await
                .unwrap();
        }
        let mut frame = [0; HEADER];
        for _ in 0..MAX_REQUESTS {
            read.read_exact(&mut frame).await.unwrap();
        }
        assert!(!activity.is_idle());
        let last = tokio::spawn(async move { read.read_exact(&mut frame).await.map(|_| ()) });
        tokio::task::yield_now().await;
        assert!(!last.is_finished());
        write.write_all(&header(0, 1, RESPONSE)).await.unwrap();
        last.await.unwrap().unwrap();
    }

    fn of(stream_id: u32, kind: u8, flags: u8) -> Header {
        Header {
            length: 0,
            stream_id,
            kind,
            flags,
        }
    }

    #[test]
    fn open_streams_hold_nothing_back_and_their_unanswered_messages_do() {
        let mut waiting = Unanswered::default();
        for stream in 0..MAX_STREAMS as u32 {
            let open = of(2 * stream + 1, REQUEST, REMOTE_OPEN);
            waiting.received(open).unwrap();
        }
        assert!(!waiting.is_full());
        assert!(waiting.received(of(1, REQUEST, 0)).is_err());
        assert!(waiting.received(of(999, REQUEST, REMOTE_OPEN)).is_err());
        for _ in 0..MAX_MESSAGES {
            waiting.received(of(1, DATA, 0)).unwrap();
        }
        assert!(waiting.is_full());
        waiting.sent(of(1, DATA, 0));
        assert!(!waiting.is_full());
        // The end of the stream, with messages that nobody has taken.
        waiting.sent(of(1, DATA, REMOTE_CLOSED));
        assert_eq!((waiting.messages, waiting.streams), (0, MAX_STREAMS - 1));
    }

    #[test]
    fn messages_for_no_stream_are_answered_one_by_one() {
        let mut waiting = Unanswered::default();
        for _ in 0..MAX_MESSAGES {
            waiting.received(of(7, DATA, 0)).unwrap();
        }
        assert!(waiting.is_full());
        for _ in 0..MAX_MESSAGES {
            waiting.sent(of(7, RESPONSE, 0));
        }
        assert_eq!(waiting.messages, 0);
        assert!(waiting.of_stream.is_empty());
    }

    #[tokio::test]
    async fn an_evicted_connection_ends() {
        let (mut ours, _theirs, activity) = guarded();
        activity.evict();
        assert!(ours.read_u8().await.is_err());
    }
}
