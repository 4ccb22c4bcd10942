//! Two logical connections over one unix socket, the way NRI's Go library does it
//! (containerd/nri v0.12.0 `pkg/net/multiplex/mux.go`, containerd/ttrpc v1.2.8 `channel.go`).
//!
//! Its limits are imitated because plugins run into them:
//! - Go's ttrpc reads through a 4,096-byte `bufio.Reader`, and the mux fails a read whose buffer is
//!   smaller than the frame. So a frame may have at most 4,096 bytes, except inside a message of
//!   which at least 4,096 bytes are missing, where the buffer is what is missing.
//! - a connection with 256 unread frames ends everything.
//! - a message is written as one frame of at most 4,096 bytes and one with all the rest.
//!
//! One task owns the socket. When it is asked to close, or when anything fails, the file
//! descriptor is closed before anybody is told: the runtime does not call the next plugin before
//! the kernel shows the late one as closed, and neither does Go (`Close` returns after close(2)).

use std::io;
use std::pin::pin;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, mpsc, watch};

/// Connection on which the plugin serves `Plugin`.
const PLUGIN_SERVICE: u32 = 1;
/// Connection on which the runtime serves `Runtime`.
const RUNTIME_SERVICE: u32 = 2;

const HEADER_BYTES: usize = 8;
const TTRPC_HEADER_BYTES: usize = 10;
/// ttrpc's largest message, header not counted.
pub(crate) const MAX_MESSAGE_BYTES: usize = 4 << 20;
const MAX_FRAME_BYTES: usize = MAX_MESSAGE_BYTES + TTRPC_HEADER_BYTES;
/// Size of Go's `bufio.Reader` and `bufio.Writer`.
const GO_BUFFER_BYTES: usize = 4096;
/// Frames that may wait unread on one connection.
const MAX_UNREAD_FRAMES: usize = 256;
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Under way between ttrpc and here, in each direction; smaller makes big messages slow.
const PIPE_BYTES: usize = 64 << 10;

/// The socket of one plugin. Dropping it closes the socket soon; [`Mux::close`] waits for it.
#[derive(Debug)]
pub(crate) struct Mux {
    commands: mpsc::Sender<Command>,
    closed: Ended,
}

#[derive(Debug)]
enum Command {
    Write(Vec<u8>),
    Close,
}

/// Tells when a socket is closed, and why.
pub(crate) type Ended = watch::Receiver<Option<String>>;

/// Waits until the socket is closed and says why.
pub(crate) async fn wait_ended(mut ended: Ended) -> String {
    match ended.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone().unwrap_or_default(),
        // Only when the task was torn down with the whole tokio runtime.
        Err(_) => String::new(),
    }
}

/// The two logical connections, for ttrpc.
pub(crate) struct Connections {
    pub plugin_service: DuplexStream,
    pub runtime_service: DuplexStream,
}

impl Mux {
    /// Takes the socket over and starts reading.
    pub fn start(stream: UnixStream) -> (Mux, Connections) {
        let (plugin_service, plugin_end) = tokio::io::duplex(PIPE_BYTES);
        let (runtime_service, runtime_end) = tokio::io::duplex(PIPE_BYTES);
        let (commands, commanded) = mpsc::channel(4);
        let (tell_closed, closed) = watch::channel(None);
        tokio::spawn(async move {
            let end = relay(&stream, plugin_end, runtime_end, commanded).await;
            drop(stream);
            let reason = end.err().map_or("closed".into(), |error| error.to_string());
            tracing::debug!(reason, "connection ended");
            tell_closed.send_replace(Some(reason));
        });
        (
            Mux { commands, closed },
            Connections {
                plugin_service,
                runtime_service,
            },
        )
    }

    /// Closes the socket; on return it is closed in the kernel.
    pub async fn close(&self) {
        // The receiver is gone when the socket is closed already.
        let _ = self.commands.send(Command::Close).await;
        self.ended().await;
    }

    /// Waits until the socket is closed and says why.
    pub async fn ended(&self) -> String {
        wait_ended(self.watch()).await
    }

    /// For [`wait_ended`], by those who must not keep the socket open.
    pub fn watch(&self) -> Ended {
        self.closed.clone()
    }

    pub fn is_closed(&self) -> bool {
        self.closed.borrow().is_some()
    }

    /// Writes bytes between two frames, whatever they are.
    pub async fn write_raw(&self, bytes: Vec<u8>) -> io::Result<()> {
        self.commands
            .send(Command::Write(bytes))
            .await
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Moves bytes between the socket and the two connections until one of them fails or a command
/// says so. Everything runs in this one future, so nothing holds the socket when it returns.
async fn relay(
    stream: &UnixStream,
    plugin_end: DuplexStream,
    runtime_end: DuplexStream,
    commands: mpsc::Receiver<Command>,
) -> io::Result<()> {
    let (plugin_read, plugin_write) = tokio::io::split(plugin_end);
    let (runtime_read, runtime_write) = tokio::io::split(runtime_end);
    let (plugin_queue, plugin_frames) = mpsc::channel(MAX_UNREAD_FRAMES);
    let (runtime_queue, runtime_frames) = mpsc::channel(MAX_UNREAD_FRAMES);
    let writer = Writer {
        stream,
        turn: Mutex::new(()),
    };
    tokio::select! {
        end = obey(&writer, commands) => end,
        end = read_frames(stream, plugin_queue, runtime_queue) => end,
        end = deliver(plugin_frames, plugin_write) => end,
        end = deliver(runtime_frames, runtime_write) => end,
        end = send_messages(&writer, PLUGIN_SERVICE, plugin_read) => end,
        end = send_messages(&writer, RUNTIME_SERVICE, runtime_read) => end,
    }
}

async fn obey(writer: &Writer<'_>, mut commands: mpsc::Receiver<Command>) -> io::Result<()> {
    while let Some(command) = commands.recv().await {
        match command {
            Command::Write(bytes) => writer.write(&bytes).await?,
            Command::Close => break,
        }
    }
    Ok(())
}

/// Reads frames and queues them. Frames of other connections are dropped, as in Go.
async fn read_frames(
    stream: &UnixStream,
    plugin_queue: mpsc::Sender<Vec<u8>>,
    runtime_queue: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let mut reader = Reader::new(stream);
    loop {
        let mut header = [0; HEADER_BYTES];
        if !reader.read_exact_or_end(&mut header).await? {
            return Ok(());
        }
        let [c0, c1, c2, c3, l0, l1, l2, l3] = header;
        let connection = u32::from_be_bytes([c0, c1, c2, c3]);
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        // Go allocates whatever is asked for; a simulation has to be kinder to its machine.
        if length > MAX_FRAME_BYTES {
            return Err(io::Error::other(format!(
                "frame of {length} bytes is larger than any message"
            )));
        }
        let mut payload = vec![0; length];
        if !reader.read_exact_or_end(&mut payload).await? && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let queue = match connection {
            PLUGIN_SERVICE => &plugin_queue,
            RUNTIME_SERVICE => &runtime_queue,
            _ => continue,
        };
        if queue.try_send(payload).is_err() {
            return Err(io::Error::other("failed to queue payload for reading"));
        }
        // Go's readers run beside this loop; here they get their turn.
        tokio::task::yield_now().await;
    }
}

/// Hands queued frames to ttrpc, with the limit of Go's read buffer.
async fn deliver(
    mut frames: mpsc::Receiver<Vec<u8>>,
    mut connection: WriteHalf<DuplexStream>,
) -> io::Result<()> {
    let mut position = Position::default();
    while let Some(frame) = frames.recv().await {
        let limit = position.read_buffer_bytes();
        if frame.len() > limit {
            return Err(io::Error::other(format!(
                "cannot allocate memory: frame of {} bytes, read buffer of {limit}",
                frame.len()
            )));
        }
        position.advance(&frame);
        connection.write_all(&frame).await?;
    }
    Ok(())
}

/// Where in ttrpc's byte stream a reader is: what Go's buffer size depends on.
#[derive(Debug, Default)]
struct Position {
    header: [u8; 4],
    /// Bytes of the current message's header that have passed; the first four are its length.
    header_seen: usize,
    /// Bytes of the current message that are missing, once its header has passed.
    missing: usize,
}

impl Position {
    /// `bufio.Reader` reads directly into a destination at least as large as itself.
    fn read_buffer_bytes(&self) -> usize {
        self.missing.max(GO_BUFFER_BYTES)
    }

    fn advance(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if self.missing > 0 {
                let step = self.missing.min(bytes.len());
                self.missing -= step;
                bytes = &bytes[step..];
                continue;
            }
            if let Some(slot) = self.header.get_mut(self.header_seen) {
                *slot = *first;
            }
            self.header_seen += 1;
            bytes = rest;
            if self.header_seen == TTRPC_HEADER_BYTES {
                self.header_seen = 0;
                self.missing = u32::from_be_bytes(self.header) as usize;
            }
        }
    }
}

/// Takes whole messages from ttrpc and writes them in the frames that Go would use.
async fn send_messages(
    writer: &Writer<'_>,
    connection: u32,
    mut messages: ReadHalf<DuplexStream>,
) -> io::Result<()> {
    loop {
        let mut message = vec![0; TTRPC_HEADER_BYTES];
        if let Err(error) = messages.read_exact(&mut message).await {
            match error.kind() {
                // ttrpc has given up this connection; the other one decides when all ends.
                io::ErrorKind::UnexpectedEof => return std::future::pending().await,
                _ => return Err(error),
            }
        }
        let length = u32::from_be_bytes([message[0], message[1], message[2], message[3]]) as usize;
        if length > MAX_MESSAGE_BYTES {
            return Err(io::Error::other("ttrpc wrote an oversized message"));
        }
        message.resize(TTRPC_HEADER_BYTES + length, 0);
        messages
            .read_exact(&mut message[TTRPC_HEADER_BYTES..])
            .await?;
        let (first, rest) = message.split_at(message.len().min(GO_BUFFER_BYTES));
        writer.write(&frame(connection, first)).await?;
        if !rest.is_empty() {
            writer.write(&frame(connection, rest)).await?;
        }
    }
}

/// A frame with this payload.
pub(crate) fn frame(connection: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("payloads are messages of at most 4 MiB");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend_from_slice(&header(connection, length));
    bytes.extend_from_slice(payload);
    bytes
}

/// The header of a frame with this many bytes of payload.
pub(crate) fn header(connection: u32, length: u32) -> [u8; HEADER_BYTES] {
    let [c0, c1, c2, c3] = connection.to_be_bytes();
    let [l0, l1, l2, l3] = length.to_be_bytes();
    [c0, c1, c2, c3, l0, l1, l2, l3]
}

/// Writes to the socket, one frame at a time.
struct Writer<'a> {
    stream: &'a UnixStream,
    turn: Mutex<()>,
}

impl Writer<'_> {
    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        let _turn = self.turn.lock().await;
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads from a socket that it does not own, through a buffer.
struct Reader<'a> {
    stream: &'a UnixStream,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    fn new(stream: &'a UnixStream) -> Self {
        Reader {
            stream,
            buffer: vec![0; READ_BUFFER_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// Fills `out`. False when the other side had closed before its first byte; an end after that
    /// is an error.
    async fn read_exact_or_end(&mut self, out: &mut [u8]) -> io::Result<bool> {
        let mut filled = 0;
        while filled < out.len() {
            if self.start == self.end && !self.fill().await? {
                return match filled {
                    0 => Ok(false),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            let step = (self.end - self.start).min(out.len() - filled);
            out[filled..filled + step].copy_from_slice(&self.buffer[self.start..self.start + step]);
            self.start += step;
            filled += step;
        }
        Ok(true)
    }

    async fn fill(&mut self) -> io::Result<bool> {
        let mut ready = pin!(self.stream.readable());
        loop {
            ready.as_mut().await?;
            match self.stream.try_read(&mut self.buffer) {
                Ok(count) => {
                    self.start = 0;
                    self.end = count;
                    return Ok(count > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready.set(self.stream.readable());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncReadExt;

    const LIMIT: Duration = Duration::from_secs(20);

    async fn ended(mux: &Mux) -> String {
        tokio::time::timeout(LIMIT, mux.ended())
            .await
            .expect("ends")
    }

    /// A ttrpc message of `length` bytes, header included.
    fn message(length: usize) -> Vec<u8> {
        let mut bytes = vec![7; length];
        let body = u32::try_from(length - TTRPC_HEADER_BYTES).expect("small");
        bytes[..4].copy_from_slice(&body.to_be_bytes());
        bytes
    }

    async fn read_frame(stream: &mut UnixStream) -> (u32, Vec<u8>) {
        let connection = stream.read_u32().await.expect("a header");
        let length = stream.read_u32().await.expect("a header");
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.expect("a payload");
        (connection, payload)
    }

    #[tokio::test]
    async fn messages_are_framed_as_by_go() {
        for (length, frames) in [
            (10, vec![10]),
            (4096, vec![4096]),
            (4097, vec![4096, 1]),
            (100_000, vec![4096, 95_904]),
        ] {
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            let (_mux, mut connections) = Mux::start(ours);
            let sent = message(length);
            let writes = sent.clone();
            tokio::spawn(async move {
                // In pieces that have nothing to do with the frames.
                for piece in writes.chunks(1000) {
                    connections
                        .runtime_service
                        .write_all(piece)
                        .await
                        .expect("writes");
                }
                std::future::pending::<()>().await;
            });
            let mut received = Vec::new();
            for expected in frames {
                let (connection, payload) = read_frame(&mut theirs).await;
                assert_eq!((connection, payload.len()), (RUNTIME_SERVICE, expected));
                received.extend(payload);
            }
            assert_eq!(received, sent);
        }
    }

    #[tokio::test]
    async fn a_frame_may_be_larger_than_gos_buffer_only_inside_a_large_message() {
        let sent = message(20_000);
        for (frames, fits) in [
            (vec![&sent[..4096], &sent[4096..]], true),
            (vec![&sent[..4097]], false),
            (vec![&sent[..10], &sent[10..]], true),
            // 904 bytes are missing, so Go reads into its buffer of 4,096.
            (
                vec![
                    &sent[..4096],
                    &sent[4096..19_096],
                    &[&sent[19_096..], &sent[..3192]].concat(),
                ],
                true,
            ),
            (
                vec![
                    &sent[..4096],
                    &sent[4096..19_096],
                    &[&sent[19_096..], &sent[..3193]].concat(),
                ],
                false,
            ),
        ] {
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            let (mux, mut connections) = Mux::start(ours);
            let total: usize = frames.iter().map(|frame| frame.len()).sum();
            for payload in &frames {
                theirs
                    .write_all(&frame(PLUGIN_SERVICE, payload))
                    .await
                    .expect("writes");
            }
            if fits {
                let mut received = vec![0; total];
                connections
                    .plugin_service
                    .read_exact(&mut received)
                    .await
                    .expect("reads");
                assert_eq!(received, frames.concat());
                assert!(!mux.is_closed());
            } else {
                // Somebody reads, as ttrpc does.
                let mut rest = Vec::new();
                let read = connections.plugin_service.read_to_end(&mut rest);
                tokio::time::timeout(LIMIT, read)
                    .await
                    .expect("ends")
                    .expect("reads");
                assert!(ended(&mux).await.starts_with("cannot allocate memory"));
            }
        }
    }

    #[tokio::test]
    async fn too_many_unread_frames_end_everything() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let (mux, _unread) = Mux::start(ours);
        let mut written = 0;
        // Some beyond the queue are under way to the reader.
        while written < MAX_UNREAD_FRAMES + 2 * PIPE_BYTES / GO_BUFFER_BYTES {
            let bytes = frame(PLUGIN_SERVICE, &[0; GO_BUFFER_BYTES]);
            if theirs.write_all(&bytes).await.is_err() {
                break;
            }
            written += 1;
        }
        assert_eq!(ended(&mux).await, "failed to queue payload for reading");
        assert!(written >= MAX_UNREAD_FRAMES);
    }

    #[tokio::test]
    async fn after_close_the_other_side_reads_the_end_at_once() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (mux, mut connections) = Mux::start(ours);
        mux.close().await;
        assert!(mux.is_closed());
        // No waiting: the kernel knows by now.
        theirs.readable().await.expect("readable");
        assert_eq!(theirs.try_read(&mut [0]).expect("the end, not an error"), 0);
        let read = connections.plugin_service.read_u8().await;
        assert!(read.is_err(), "ttrpc is told, too");
    }

    #[tokio::test]
    async fn frames_of_unknown_connections_are_dropped_and_ends_are_told_apart() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let (mux, mut connections) = Mux::start(ours);
        theirs.write_all(&frame(77, b"who?")).await.expect("writes");
        theirs
            .write_all(&frame(RUNTIME_SERVICE, b"x"))
            .await
            .expect("writes");
        assert_eq!(
            connections.runtime_service.read_u8().await.expect("reads"),
            b'x'
        );
        drop(theirs);
        assert_eq!(ended(&mux).await, "closed");

        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let (mux, _connections) = Mux::start(ours);
        theirs
            .write_all(&header(PLUGIN_SERVICE, 9))
            .await
            .expect("writes");
        drop(theirs);
        assert_eq!(ended(&mux).await, "unexpected end of file");
    }
}
