//! The listeners and the threads of the front door. One thread for each listener accepts
//! connections and assigns each to one of a few serving threads. The caller's thread makes the
//! status. When the front door stops, it answers the requests that it has received.

use crate::connections::log_limit::LogLimit;
use crate::connections::tls::Tls;
use crate::connections::{Connection, Peer, Place};
use crate::front::Front;
use crate::limits::{
    ANSWER_TIME_MAX, HANDSHAKE_TIME_MAX, HEADER_BYTES_MAX, HEADER_TIME_MAX, HTTP1_BUFFER_BYTES_MAX,
    SEND_BYTES_MAX, SOCKET_BYTES_MAX, STOP_TIME_MAX, STREAMS_MAX, WINDOW_BYTES_MAX,
};
use crate::route::status;
use crate::route::{self, Received};
use hyper::Version;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use rustix::net::Shutdown;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder as RuntimeBuilder, Handle};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::MissedTickBehavior;

/// Pause after a failed `accept`: without a free file descriptor, it would fail again immediately.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Interval at which the facts of the car are read and the status is made.
const TICK: Duration = Duration::from_secs(1);

/// A bound socket.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A port of the loopback device.
    Tcp(TcpListener),
    /// A port whose callers show certificates.
    Tls(TcpListener, Tls),
}

impl Listener {
    /// Makes a blocked `accept` return, even if the socket's file was removed.
    ///
    /// # Errors
    /// The system refuses.
    pub fn shut_down(&self) -> io::Result<()> {
        let socket = match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) | Self::Tls(listener, _) => listener.as_fd(),
        };
        Ok(rustix::net::shutdown(socket, Shutdown::Both)?)
    }
}

/// A request to stop.
#[derive(Debug, Default)]
pub struct Stopping(watch::Sender<bool>);

impl Stopping {
    /// Asks every connection to end after the requests that it has received. Each listener ends
    /// when it is shut down.
    pub fn request(&self) {
        self.0.send_replace(true);
    }

    /// Returns whether the front door must stop.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }
}

/// Serves on `listeners` until `stopping` is requested and each listener is shut down.
///
/// # Errors
/// The system gives no thread or no event queue.
pub fn serve(
    front: &Arc<Front>,
    listeners: &[Arc<Listener>],
    stopping: &Stopping,
) -> io::Result<()> {
    let serving = watch::Sender::new(());
    let start = |number| serving_thread(number, serving.subscribe());
    let started = (0..front.rules.threads).map(start).collect::<io::Result<Vec<_>>>()?;
    let (handles, threads): (Vec<_>, Vec<_>) = started.into_iter().unzip();
    let ended_early = Arc::new(LogLimit::new("a connection ended early"));
    let acceptor = Acceptor { front, stopping, handles, next: AtomicUsize::new(0), ended_early };

    // Before the first caller, who would find an empty status for a second.
    status::tick(front);
    std::thread::scope(|scope| {
        let (accepting, ended) = channel::<()>();
        let accept = |listener| {
            let (acceptor, accepting) = (&acceptor, accepting.clone());
            let accept = move || {
                acceptor.accept_all(listener);
                drop(accepting);
            };
            std::thread::Builder::new().name("accept".to_owned()).spawn_scoped(scope, accept)
        };
        let started = listeners.iter().try_for_each(|listener| accept(listener).map(drop));
        if started.is_err() {
            // Otherwise the scope would wait for the other listeners for ever.
            stopping.request();
            listeners.iter().for_each(|listener| drop(listener.shut_down()));
        }
        drop(accepting);
        // Until the last accepting thread has ended.
        while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            status::tick(front);
        }
        started
    })?;

    let left = front.connections.wait_ended(STOP_TIME_MAX);
    if left > 0 {
        log::warn!("{left} connections did not end within {STOP_TIME_MAX:?}");
    }
    drop(serving);
    threads.into_iter().for_each(|thread| drop(thread.join()));
    acceptor.ended_early.end();
    Ok(())
}

/// Starts the serving thread `number`, which ends when the sender of `ended` is dropped.
fn serving_thread(
    number: u32,
    mut ended: watch::Receiver<()>,
) -> io::Result<(Handle, JoinHandle<()>)> {
    let runtime = RuntimeBuilder::new_current_thread().enable_io().enable_time().build()?;
    let handle = runtime.handle().clone();
    let run = move || {
        // The error says that the sender was dropped.
        let _ = runtime.block_on(ended.changed());
        runtime.shutdown_timeout(STOP_TIME_MAX);
    };
    let thread = std::thread::Builder::new().name(format!("front {number}")).spawn(run)?;
    Ok((handle, thread))
}

/// State that the accepting threads share.
struct Acceptor<'a> {
    front: &'a Arc<Front>,
    stopping: &'a Stopping,
    handles: Vec<Handle>,
    /// Counts connections, so that each goes to the next thread.
    next: AtomicUsize,
    ended_early: Arc<LogLimit>,
}

impl Acceptor<'_> {
    /// Accepts connections until the front door stops.
    fn accept_all(&self, listener: &Listener) {
        // Accepted sockets have their listener's bounds, also for bytes that come before.
        if let Listener::Tcp(tcp) | Listener::Tls(tcp, _) = listener {
            let _ = bound_buffers(tcp).inspect_err(|e| self.ended_early.warn(e));
        }
        while !self.stopping.is_requested() {
            if let Err(e) = self.accept(listener)
                && !self.stopping.is_requested()
            {
                self.ended_early.warn(&e);
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    fn accept(&self, listener: &Listener) -> io::Result<()> {
        match listener {
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let user = rustix::net::sockopt::socket_peercred(&stream)?.uid;
                stream.set_nonblocking(true)?;
                bound_buffers(&stream)?;
                self.start(Peer::User(user.as_raw()), async move || UnixStream::from_std(stream));
            }
            Listener::Tcp(listener) => {
                let stream = prepared(listener.accept()?.0)?;
                self.start(Peer::Loopback, async move || TcpStream::from_std(stream));
            }
            Listener::Tls(listener, tls) => {
                let ((stream, address), tls) = (listener.accept()?, tls.clone());
                let stream = prepared(stream)?;
                let open = async move || tls.accept(TcpStream::from_std(stream)?).await;
                self.start(Peer::Certified(address), open);
            }
        }
        Ok(())
    }

    /// Gives a connection of `peer` a place and a serving thread. `open` makes the stream on that
    /// thread.
    fn start<S, F>(&self, peer: Peer, open: impl FnOnce() -> F + Send + 'static)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>> + Send,
    {
        let Some(place) = self.front.connections.admit(peer) else {
            // `open` is dropped with its stream, which closes the connection.
            self.front.metrics.connections_refused.inc();
            return;
        };
        self.front.metrics.connections.inc();

        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len();
        let (front, ended_early) = (Arc::clone(self.front), Arc::clone(&self.ended_early));
        let stopping = self.stopping.0.subscribe();
        self.handles[number].spawn(async move {
            let ended = match opened(open(), &place.connection).await {
                Ok(stream) => run(front, stream, &place, stopping).await,
                Err(e) => Err(e.into()),
            };
            if let Err(e) = ended {
                ended_early.warn(&e);
            }
        });
    }
}

/// Returns an accepted stream, ready for an event queue.
fn prepared(stream: std::net::TcpStream) -> io::Result<std::net::TcpStream> {
    stream.set_nonblocking(true)?;
    // Otherwise the end of an answer would wait until the caller has acknowledged its start.
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Bounds what the system keeps for a caller that does not read. Its own bound is megabytes.
fn bound_buffers(stream: &impl AsFd) -> io::Result<()> {
    set_socket_recv_buffer_size(stream, SOCKET_BYTES_MAX)?;
    Ok(set_socket_send_buffer_size(stream, SOCKET_BYTES_MAX)?)
}

/// Waits for the stream of `connection`, until the connection must make room for another one.
async fn opened<S>(
    open: impl Future<Output = io::Result<S>>,
    connection: &Connection,
) -> io::Result<S> {
    tokio::select! {
        biased;
        // A connection in its handshake is silent too, and makes room like the others.
        () = connection.closed() => Err(io::ErrorKind::ConnectionAborted.into()),
        open = tokio::time::timeout(HANDSHAKE_TIME_MAX, open) => open?,
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

/// Runs one connection to its end.
async fn run<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    front: Arc<Front>,
    stream: S,
    place: &Place,
    mut stopping: watch::Receiver<bool>,
) -> Result<(), ConnectionError> {
    let connection = Arc::clone(&place.connection);
    let service = service_fn(|request| {
        // Before the connection reads on, so that it keeps the headers of one request only.
        let is_http2 = request.version() == Version::HTTP_2;
        let request = Received::new(&front, &connection, request);
        let (front, connection) = (Arc::clone(&front), Arc::clone(&connection));
        async move {
            // The requests of HTTP/2 are tasks of their own, which take turns anyway.
            let turns = if is_http2 { 0 } else { connection.turns_to_wait() };
            for _ in 0..turns {
                yield_now().await;
            }
            let answered = route::answer(&front, &connection, request).await;
            connection.note_answer();
            Ok::<_, Infallible>(answered)
        }
    });
    let io = TokioIo::new(Watched { stream: stream.take(0), connection: Arc::clone(&connection) });
    let builder = protocol();
    let mut served = pin!(builder.serve_connection(io, service));
    let mut closed = pin!(connection.closed());
    let mut stopped = pin!(stopping.wait_for(|is_requested| *is_requested));

    let mut periods = tokio::time::interval(ANSWER_TIME_MAX);
    // After a stall of this thread, the periods that were missed are not examined one by one.
    periods.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_stopping = false;
    poll_fn(|context| {
        connection.begin_turn();
        while periods.poll_tick(context).is_ready() {
            connection.begin_period()?;
        }
        if closed.as_mut().poll(context).is_ready() {
            // The last poll writes answers that are ready.
            served.as_mut().graceful_shutdown();
            let _ = served.as_mut().poll(context);
            return Poll::Ready(Ok(()));
        }
        if !is_stopping && stopped.as_mut().poll(context).is_ready() {
            // A future that is complete must not be polled again.
            is_stopping = true;
            served.as_mut().graceful_shutdown();
        }
        served.as_mut().poll(context)
    })
    .await
}

/// Returns the HTTP settings of a connection; its first bytes decide between HTTP/1.1 and HTTP/2.
fn protocol() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME_MAX)
        .max_buf_size(HTTP1_BUFFER_BYTES_MAX)
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(WINDOW_BYTES_MAX)
        .initial_connection_window_size(WINDOW_BYTES_MAX)
        .max_header_list_size(HEADER_BYTES_MAX)
        .max_send_buf_size(SEND_BYTES_MAX);
    builder
}

/// A stream that notes when its caller sent or took bytes, and bounds what it reads in one turn.
struct Watched<S> {
    stream: Take<S>,
    connection: Arc<Connection>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let turn_bytes = self.connection.turn_bytes();
        if turn_bytes == 0 {
            // A caller that always has more to read would keep the thread from the others.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.stream.set_limit(turn_bytes as u64);
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        if bytes > 0 {
            self.connection.note_activity();
            self.connection.count_read(bytes)?;
        }
        read
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(self.stream.get_mut()).poll_write(context, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(self.stream.get_mut()).poll_write_vectored(context, parts);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_shutdown(context)
    }
}

impl<S> Watched<S> {
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.connection.note_activity();
            self.connection.note_moved(0);
            // A caller that takes answers sends frames that say so.
            self.connection.count_used(bytes / 64);
        }
        written
    }
}
