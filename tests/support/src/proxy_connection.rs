//! One client's connection through the proxy: two pumps that share a [`Conversation`].
//!
//! It ends when both sides have closed, on an error of either side, when the proxy ends it, or by a fault. In all cases
//! but the first the client sees a reset, never an orderly close.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, sleep_until};

use crate::proxy::{Place, Shared};
use crate::proxy_fault::Armed;
use crate::proxy_protocol::{Conversation, Step};

const READ_BYTES: usize = 64 * 1024;

/// How a connection ended.
enum End {
    Closed,
    Reset,
    /// A fault was applied; the test is notified when the sockets are closed.
    Struck(Armed),
}

impl From<io::Error> for End {
    /// An error on one side becomes a reset on the other.
    fn from(_: io::Error) -> End {
        End::Reset
    }
}

/// Serves one client to the end. The place is released when the client's socket is closed.
pub(crate) async fn serve(shared: Arc<Shared>, place: Place, mut client: TcpStream) {
    let end = tokio::select! {
        end = pump_both(&shared, &mut client) => end,
        () = place.until_reset() => End::Reset,
    };
    match end {
        End::Closed => drop(client),
        End::Reset => reset(client),
        End::Struck(fault) => {
            reset(client);
            fault.fire();
        }
    }
}

fn reset(client: TcpStream) {
    // With a linger time of zero, the kernel sends a reset. It fails only for a socket that is already closed.
    let _ = client.set_zero_linger();
    drop(client);
}

async fn pump_both(shared: &Shared, client: &mut TcpStream) -> End {
    shared.until_passing().await;
    let upstream = shared.upstream();
    let Ok(mut server) = TcpStream::connect((upstream.host.as_str(), upstream.port)).await else {
        return End::Reset;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let conversation = Mutex::new(Conversation::default());
    let (client_reader, client_writer) = client.split();
    let (server_reader, server_writer) = server.split();
    if let Some(delay) = shared.delay() {
        let requests = pump_late(shared, client_reader, server_writer, delay);
        let answers = pump_late(shared, server_reader, client_writer, delay);
        return tokio::try_join!(requests, answers).map_or_else(|end| end, |_| End::Closed);
    }
    let requests =
        pump(shared, client_reader, server_writer, |buffer| lock(&conversation).client_sent(buffer, shared.faults()));
    let answers = pump(shared, server_reader, client_writer, |buffer| lock(&conversation).server_sent(buffer));
    let outcome = tokio::try_join!(requests, answers);
    let pending = conversation.into_inner().expect("nothing panics while holding it").into_pending_fault();
    match (outcome, pending) {
        (Err(End::Struck(fault)), _) | (_, Some(fault)) => End::Struck(fault),
        (Err(end), None) => end,
        (Ok(_), None) => End::Closed,
    }
}

/// Copies one direction until its end, which it passes on.
async fn pump(
    shared: &Shared,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut decide: impl FnMut(&mut Vec<u8>) -> Step,
) -> Result<(), End> {
    let mut buffer = Vec::new();
    let mut chunk = vec![0; READ_BYTES];
    loop {
        shared.until_passing().await;
        let count = from.read(&mut chunk).await?;
        // The black hole may have started while we waited for bytes.
        shared.until_passing().await;
        if count == 0 {
            to.shutdown().await?;
            return Ok(());
        }
        buffer.extend_from_slice(&chunk[..count]);
        match decide(&mut buffer) {
            Step::Forward(messages) => to.write_all(&messages).await?,
            Step::Reset(messages, fault) => {
                // The fault counts even if these bytes can no longer be delivered.
                let _ = to.write_all(&messages).await;
                return Err(End::Struck(fault));
            }
            Step::Hang(messages, fault) => {
                let _ = to.write_all(&messages).await;
                fault.fire();
                while from.read(&mut chunk).await? > 0 {}
                return Err(End::Reset);
            }
        }
    }
}

/// Copies one direction until its end, with a delay. Reading continues during the delay: it adds latency, and does not
/// limit the bandwidth.
async fn pump_late(shared: &Shared, mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, delay: Duration) -> Result<(), End> {
    let (sender, mut on_their_way) = unbounded_channel::<(Instant, Vec<u8>)>();
    let reading = async move {
        let mut chunk = vec![0; READ_BYTES];
        loop {
            let count = from.read(&mut chunk).await?;
            if count == 0 {
                return Ok::<(), End>(());
            }
            // It fails only when the other half has ended, which ends this one.
            let _ = sender.send((Instant::now() + delay, chunk[..count].to_vec()));
        }
    };
    let writing = async {
        while let Some((due, piece)) = on_their_way.recv().await {
            if !delay.is_zero() {
                sleep_until(due).await;
            }
            shared.until_passing().await;
            to.write_all(&piece).await?;
        }
        to.shutdown().await?;
        Ok(())
    };
    tokio::try_join!(reading, writing).map(drop)
}

fn lock(conversation: &Mutex<Conversation>) -> MutexGuard<'_, Conversation> {
    conversation.lock().expect("nothing panics while holding it")
}
