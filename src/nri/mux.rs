//! NRI's multiplexed connection, from the plugin's end: two byte streams over one unix socket.
//!
//! A frame is 8 bytes of header (connection id and payload length, both big-endian u32) and the
//! payload (containerd/nri `pkg/net/multiplex/mux.go`). On connection [`PLUGIN_CONNECTION`] we
//! serve, on [`RUNTIME_CONNECTION`] we are the client. This file knows frames and nothing of ttrpc.
//!
//! Two limits come from the Go side's reader: a frame larger than its read buffer (ttrpc's
//! 4,096-byte bufio) breaks the connection, so we never write a larger payload; and it closes a
//! connection on 256 unread frames, so what we send stays small.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc;

/// Connection id of the Plugin service, served by the plugin.
pub const PLUGIN_CONNECTION: u32 = 1;
/// Connection id of the Runtime service, served by the runtime.
pub const RUNTIME_CONNECTION: u32 = 2;

/// Largest payload we write in one frame, see above.
const MAX_WRITE: usize = 4096;
/// Largest frame we accept: ttrpc's message limit and header.
const MAX_READ: usize = (4 << 20) + 10;
/// Payloads are passed on in pieces of at most this size, so that a header alone cannot make us
/// allocate what it announces.
const CHUNK: usize = 64 << 10;
/// Pieces that may wait for a slow reader before the socket is left unread.
const QUEUED_CHUNKS: usize = 32;

const HEADER: usize = 8;

/// Splits `stream` into the two connections. The returned future moves bytes; it ends with `Ok` on
/// the peer's end of file at a frame boundary and with an error on anything else. When it ends, or
/// is dropped, both connections read end of file.
pub fn split(
    stream: UnixStream,
) -> (
    MuxStream,
    MuxStream,
    impl Future<Output = io::Result<()>> + Send,
) {
    let (read, write) = stream.into_split();
    let writer = Arc::new(Writer {
        socket: write,
        partial: Mutex::new(Vec::new()),
    });
    let (plugin_tx, plugin_rx) = mpsc::channel(QUEUED_CHUNKS);
    let (runtime_tx, runtime_rx) = mpsc::channel(QUEUED_CHUNKS);
    (
        MuxStream::new(PLUGIN_CONNECTION, plugin_rx, writer.clone()),
        MuxStream::new(RUNTIME_CONNECTION, runtime_rx, writer),
        read_frames(read, plugin_tx, runtime_tx),
    )
}

async fn read_frames(
    mut socket: OwnedReadHalf,
    plugin: mpsc::Sender<Vec<u8>>,
    runtime: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let mut header = [0u8; HEADER];
    loop {
        // End of file is a normal end only between frames.
        if socket.read(&mut header[..1]).await? == 0 {
            return Ok(());
        }
        socket.read_exact(&mut header[1..]).await?;
        let id = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        let length = u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if length > MAX_READ {
            return Err(invalid(format!(
                "frame of {length} bytes on connection {id}, at most {MAX_READ} are accepted"
            )));
        }
        let target = match id {
            PLUGIN_CONNECTION => Some(&plugin),
            RUNTIME_CONNECTION => Some(&runtime),
            // As the Go side does: frames for a connection nobody opened are dropped.
            _ => None,
        };
        let mut left = length;
        while left > 0 {
            let mut chunk = vec![0; left.min(CHUNK)];
            socket.read_exact(&mut chunk).await?;
            left -= chunk.len();
            if let Some(target) = target {
                // A closed receiver means that this half is not wanted any more.
                let _ = target.send(chunk).await;
            }
        }
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// The shared write side. A frame is either wholly in the socket or its rest is in `partial`, so
/// that frames of the two connections never mix.
struct Writer {
    socket: tokio::net::unix::OwnedWriteHalf,
    partial: Mutex<Vec<u8>>,
}

impl Writer {
    /// Accepts one frame of at most [`MAX_WRITE`] bytes of `payload`: `WouldBlock` when the socket
    /// is full and the rest of the frame before is still waiting.
    fn try_write_frame(&self, id: u32, payload: &[u8]) -> io::Result<usize> {
        let mut partial = self.lock();
        self.try_drain(&mut partial)?;
        let payload = &payload[..payload.len().min(MAX_WRITE)];
        partial.extend_from_slice(&id.to_be_bytes());
        partial.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        partial.extend_from_slice(payload);
        match self.try_drain(&mut partial) {
            Ok(()) => Ok(payload.len()),
            // The rest is sent before the next frame or by a flush.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(payload.len()),
            Err(error) => Err(error),
        }
    }

    fn try_flush(&self) -> io::Result<()> {
        self.try_drain(&mut self.lock())
    }

    fn try_drain(&self, partial: &mut Vec<u8>) -> io::Result<()> {
        while !partial.is_empty() {
            let written = self.socket.try_write(partial)?;
            partial.drain(..written);
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        // Nothing under the lock can panic half way through a frame.
        self.partial
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

type Writable = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// One of the two connections, as a byte stream.
pub struct MuxStream {
    id: u32,
    incoming: mpsc::Receiver<Vec<u8>>,
    chunk: Vec<u8>,
    consumed: usize,
    writer: Arc<Writer>,
    /// Waiting for room in the socket. A future of its own for each stream: the socket keeps only
    /// one waker for poll-style readiness, and both streams may wait. In a mutex only because
    /// ttrpc wants `Sync`; never locked.
    writable: Mutex<Option<Writable>>,
}

impl MuxStream {
    fn new(id: u32, incoming: mpsc::Receiver<Vec<u8>>, writer: Arc<Writer>) -> Self {
        Self {
            id,
            incoming,
            chunk: Vec::new(),
            consumed: 0,
            writer,
            writable: Mutex::new(None),
        }
    }

    /// Repeats `attempt` until it does not block any more.
    fn poll_when_writable<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut attempt: impl FnMut(&Writer) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        let slot = self
            .writable
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        loop {
            if let Some(waiting) = slot {
                match waiting.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(error)) => {
                        *slot = None;
                        return Poll::Ready(Err(error));
                    }
                    Poll::Ready(Ok(())) => *slot = None,
                }
            }
            match attempt(&self.writer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writer = self.writer.clone();
                    *slot = Some(Box::pin(async move { writer.socket.writable().await }));
                }
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncRead for MuxStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.consumed == this.chunk.len() {
            match this.incoming.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Ok(())),
                Poll::Ready(Some(chunk)) => {
                    this.chunk = chunk;
                    this.consumed = 0;
                }
            }
        }
        let rest = &this.chunk[this.consumed..];
        let taken = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..taken]);
        this.consumed += taken;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MuxStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let id = self.id;
        self.poll_when_writable(cx, |writer| writer.try_write_frame(id, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_when_writable(cx, Writer::try_flush)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The other connection still needs the socket.
        self.poll_flush(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    fn frame(id: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = id.to_be_bytes().to_vec();
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    #[tokio::test]
    async fn frames_reach_the_connection_they_name() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut plugin, mut runtime, pump) = split(ours);
        let pump = tokio::spawn(pump);
        let mut bytes = frame(RUNTIME_CONNECTION, b"two");
        bytes.extend(frame(7, b"nobody"));
        bytes.extend(frame(PLUGIN_CONNECTION, b"one"));
        // One byte at a time: no boundary may matter.
        for byte in bytes {
            theirs.write_all(&[byte]).await.unwrap();
        }
        let mut got = [0; 3];
        plugin.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"one");
        runtime.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"two");
        drop(theirs);
        pump.await.unwrap().unwrap();
        assert_eq!(plugin.read(&mut got).await.unwrap(), 0);
        assert_eq!(runtime.read(&mut got).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn writes_are_cut_into_frames_that_go_can_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut plugin, _runtime, _pump) = split(ours);
        let sent = vec![9u8; 3 * MAX_WRITE + 5];
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            plugin.write_all(&sent).await.unwrap();
            plugin.flush().await.unwrap();
        });
        let mut got = Vec::new();
        while got.len() < expected.len() {
            let mut header = [0; HEADER];
            theirs.read_exact(&mut header).await.unwrap();
            assert_eq!(header[..4], PLUGIN_CONNECTION.to_be_bytes());
            let length = u32::from_be_bytes(header[4..].try_into().unwrap()) as usize;
            assert!(length <= MAX_WRITE);
            let mut payload = vec![0; length];
            theirs.read_exact(&mut payload).await.unwrap();
            got.extend(payload);
        }
        assert_eq!(got, expected);
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn two_writers_on_a_full_socket_never_mix_their_frames() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (plugin, runtime, _pump) = split(ours);
        let mut writers = Vec::new();
        for (mut stream, fill) in [(plugin, 1u8), (runtime, 2u8)] {
            writers.push(tokio::spawn(async move {
                for _ in 0..300 {
                    stream.write_all(&[fill; 3000]).await.unwrap();
                    stream.flush().await.unwrap();
                }
                stream
            }));
        }
        let mut bytes = [0usize; 3];
        while bytes[1] + bytes[2] < 2 * 300 * 3000 {
            let mut header = [0; HEADER];
            theirs.read_exact(&mut header).await.unwrap();
            let id = u32::from_be_bytes(header[..4].try_into().unwrap());
            let length = u32::from_be_bytes(header[4..].try_into().unwrap()) as usize;
            let mut payload = vec![0; length];
            theirs.read_exact(&mut payload).await.unwrap();
            assert!(payload.iter().all(|byte| u32::from(*byte) == id));
            bytes[id as usize] += length;
        }
        for writer in writers {
            writer.await.unwrap();
        }
    }

    #[tokio::test]
    async fn oversized_and_cut_off_frames_end_the_connection_with_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (_plugin, _runtime, pump) = split(ours);
        let mut header = PLUGIN_CONNECTION.to_be_bytes().to_vec();
        header.extend_from_slice(&u32::MAX.to_be_bytes());
        theirs.write_all(&header).await.unwrap();
        assert_eq!(pump.await.unwrap_err().kind(), io::ErrorKind::InvalidData);

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (_plugin, _runtime, pump) = split(ours);
        theirs
            .write_all(&frame(PLUGIN_CONNECTION, b"cut off")[..9])
            .await
            .unwrap();
        drop(theirs);
        assert_eq!(pump.await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
