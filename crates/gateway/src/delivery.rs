//! What is on its way to one caller: its relay puts it in, the transport takes it out.
//!
//! Owns: the messages that the transport has not taken yet, and, once the relay has nothing more to say, how the
//! stream ends with the request's ticket. So a request is in flight until its caller has taken the last message,
//! left, or was given up, and a drain waits for that.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::Stream;
use laneway_proto::{Failure, v1};
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;

use crate::admission::Ticket;

/// Messages that wait for a slow caller before the worker's stream is held up.
const MAX_MESSAGES: usize = 16;

/// Bytes of audio that wait for a slow caller; the chunk that reaches the bound may be over it.
const MAX_BYTES: usize = 1 << 20;

/// A message of a stream to a caller.
pub(crate) trait Message: std::fmt::Debug + Send + Unpin + 'static {
    /// Bytes of audio in it.
    fn audio_bytes(&self) -> usize;
}

impl Message for v1::SynthesizeResponse {
    fn audio_bytes(&self) -> usize {
        match &self.event {
            Some(v1::synthesize_response::Event::Chunk(chunk)) => chunk.audio.len(),
            _ => 0,
        }
    }
}

/// How a stream ends.
#[derive(Debug)]
pub(crate) enum Last<M = v1::SynthesizeResponse> {
    /// With its last message.
    Message(M),
    /// With a status that is not OK.
    Status(Status),
}

/// The caller went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// What the transport has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// A message that is not the last one.
    More,
    /// The end.
    End,
}

#[derive(Debug)]
struct Queue<M> {
    messages: VecDeque<M>,
    n_bytes: usize,
    end: End<M>,
    /// The transport, when it found nothing.
    transport: Option<Waker>,
}

#[derive(Debug)]
enum End<M> {
    /// More comes.
    Open,
    /// Behind the messages. The ticket goes when this is taken.
    Queued(Last<M>, Option<Ticket>),
    Taken,
}

impl<M: Message> Queue<M> {
    fn has_room(&self) -> bool {
        self.messages.len() < MAX_MESSAGES && self.n_bytes < MAX_BYTES
    }

    fn put(&mut self, message: M) -> Option<Waker> {
        self.n_bytes += message.audio_bytes();
        self.messages.push_back(message);
        self.transport.take()
    }
}

/// The two halves of one stream to a caller.
pub(crate) fn delivery<M: Message>() -> (Delivery<M>, Outgoing<M>) {
    let queue = Arc::new(Mutex::new(Queue {
        messages: VecDeque::new(),
        n_bytes: 0,
        end: End::Open,
        transport: None,
    }));
    let (taker, taken) = watch::channel(());
    let outgoing = Outgoing {
        queue: queue.clone(),
        taker,
    };
    (Delivery { queue, taken }, outgoing)
}

/// The relay's half. Dropped before [`Delivery::end`], it ends the stream with an internal error.
#[derive(Debug)]
pub(crate) struct Delivery<M: Message = v1::SynthesizeResponse> {
    queue: Arc<Mutex<Queue<M>>>,
    /// Changes whenever the transport has taken something, and closes when the caller leaves.
    taken: watch::Receiver<()>,
}

impl<M: Message> Drop for Delivery<M> {
    fn drop(&mut self) {
        if matches!(self.queue.lock().end, End::Open) {
            self.end(Last::Status(Failure::internal().into()), None);
        }
    }
}

impl<M: Message> Delivery<M> {
    /// Wait until the caller has left.
    pub(crate) async fn gone(&self) {
        let mut taken = self.taken.clone();
        while taken.changed().await.is_ok() {}
    }

    /// Wait until one more message may be put in.
    ///
    /// # Errors
    /// The caller left.
    pub(crate) async fn room(&self) -> Result<(), Gone> {
        let mut taken = self.taken.clone();
        loop {
            // Marked as seen before the look: what is taken behind the look wakes this up.
            taken.borrow_and_update();
            taken.has_changed().map_err(|_| Gone)?;
            if self.queue.lock().has_room() {
                return Ok(());
            }
            taken.changed().await.map_err(|_| Gone)?;
        }
    }

    /// Put a message in. Only with [`Delivery::room`].
    pub(crate) fn put(&self, message: M) {
        let transport = self.queue.lock().put(message);
        wake(transport);
    }

    /// Take the messages back that `unwanted` names and that the transport has not taken.
    pub(crate) fn take_back(&self, unwanted: impl Fn(&M) -> bool) -> Vec<M> {
        let mut queue = self.queue.lock();
        let (back, kept) = std::mem::take(&mut queue.messages)
            .into_iter()
            .partition::<VecDeque<_>, _>(unwanted);
        queue.n_bytes = kept.iter().map(M::audio_bytes).sum();
        queue.messages = kept;
        back.into()
    }

    /// Nothing comes behind `last`, which frees `ticket` as it is taken: a caller who has seen the end finds its
    /// place and its id free.
    pub(crate) fn end(&self, last: Last<M>, ticket: Option<Ticket>) {
        let mut queue = self.queue.lock();
        queue.end = End::Queued(last, ticket);
        let transport = queue.transport.take();
        drop(queue);
        wake(transport);
    }

    /// Drop everything that was not taken, and end the stream with `status` unless its end was taken already.
    pub(crate) fn give_up(&self, status: Status) {
        let mut queue = self.queue.lock();
        let messages = std::mem::take(&mut queue.messages);
        queue.n_bytes = 0;
        let end = match &queue.end {
            End::Taken => End::Taken,
            _ => std::mem::replace(&mut queue.end, End::Queued(Last::Status(status), None)),
        };
        let transport = queue.transport.take();
        drop(queue);
        // The ticket inside goes outside the lock, and before the caller can see the end.
        drop((messages, end));
        wake(transport);
    }

    /// Wait until the transport takes something, or has taken the end already.
    ///
    /// # Errors
    /// The caller left before the end.
    pub(crate) async fn taken(&mut self) -> Result<Taken, Gone> {
        let ended = |queue: &Mutex<Queue<M>>| matches!(queue.lock().end, End::Taken);
        if ended(&self.queue) {
            return Ok(Taken::End);
        }
        let changed = self.taken.changed().await;
        match (ended(&self.queue), changed) {
            (true, _) => Ok(Taken::End),
            (false, Ok(())) => Ok(Taken::More),
            (false, Err(_)) => Err(Gone),
        }
    }
}

fn wake(transport: Option<Waker>) {
    if let Some(transport) = transport {
        transport.wake();
    }
}

/// What the caller reads. Dropping it tells the relay that the caller left.
#[derive(Debug)]
pub(crate) struct Outgoing<M: Message = v1::SynthesizeResponse> {
    queue: Arc<Mutex<Queue<M>>>,
    taker: watch::Sender<()>,
}

impl<M: Message> Drop for Outgoing<M> {
    fn drop(&mut self) {
        let mut queue = self.queue.lock();
        let left = match std::mem::replace(&mut queue.end, End::Open) {
            End::Taken => {
                queue.end = End::Taken;
                return;
            }
            end => (end, std::mem::take(&mut queue.messages)),
        };
        drop(queue);
        drop(left);
    }
}

impl<M: Message> Stream for Outgoing<M> {
    type Item = Result<M, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut queue = self.queue.lock();
        let item = if let Some(message) = queue.messages.pop_front() {
            queue.n_bytes -= message.audio_bytes();
            Ok(message)
        } else {
            match std::mem::replace(&mut queue.end, End::Taken) {
                End::Open => {
                    queue.end = End::Open;
                    queue.transport = Some(context.waker().clone());
                    return Poll::Pending;
                }
                End::Taken => return Poll::Ready(None),
                End::Queued(last, ticket) => {
                    drop(queue);
                    drop(ticket);
                    self.taker.send_replace(());
                    return Poll::Ready(Some(match last {
                        Last::Message(message) => Ok(message),
                        Last::Status(status) => Err(status),
                    }));
                }
            }
        };
        drop(queue);
        self.taker.send_replace(());
        Poll::Ready(Some(item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admission;
    use crate::caller::KeyName;
    use futures::{FutureExt as _, StreamExt as _};
    use laneway_proto::{ErrorCode, RequestId};

    fn chunk(n_bytes: usize) -> v1::SynthesizeResponse {
        let chunk = v1::AudioChunk {
            audio: vec![0; n_bytes].into(),
            ..Default::default()
        };
        v1::SynthesizeResponse {
            event: Some(v1::synthesize_response::Event::Chunk(chunk)),
        }
    }

    fn status() -> Status {
        Failure::new(ErrorCode::Cancelled, "given up").into()
    }

    fn admitted(admission: &Arc<Admission>) -> Option<Ticket> {
        Some(
            admission
                .enter()
                .unwrap()
                .admit(RequestId::new("a").unwrap(), KeyName::default())
                .unwrap(),
        )
    }

    /// Put in chunks of this size until there is no room.
    fn fill(delivery: &Delivery, chunk_bytes: usize) -> usize {
        let mut n_chunks = 0;
        while delivery.room().now_or_never().is_some() {
            delivery.put(chunk(chunk_bytes));
            n_chunks += 1;
        }
        n_chunks
    }

    #[tokio::test]
    async fn what_waits_is_bounded_in_messages_and_in_bytes() {
        for (chunk_bytes, wanted) in [(100, MAX_MESSAGES), (MAX_BYTES / 4, 4), (3 * MAX_BYTES, 1)] {
            let (delivery, mut outgoing) = delivery::<v1::SynthesizeResponse>();
            assert_eq!(fill(&delivery, chunk_bytes), wanted);
            outgoing.next().await.unwrap().unwrap();
            assert_eq!(fill(&delivery, chunk_bytes), 1, "room for what was taken");
        }
    }

    #[tokio::test]
    async fn what_is_taken_back_makes_room_and_the_rest_stays() {
        let (delivery, mut outgoing) = delivery();
        delivery.put(chunk(1));
        assert_eq!(fill(&delivery, MAX_BYTES), 1);
        let back = delivery.take_back(|message| message.audio_bytes() > 1);
        assert_eq!(back, [chunk(MAX_BYTES)]);
        assert_eq!(fill(&delivery, MAX_BYTES), 1, "room for what was taken back");
        assert_eq!(outgoing.next().await.unwrap().unwrap(), chunk(1));
    }

    #[tokio::test]
    async fn a_ticket_is_held_until_the_last_message_is_taken() {
        let admission = Arc::new(Admission::new(1));
        let (mut delivery, mut outgoing) = delivery();
        delivery.put(chunk(1));
        delivery.end(Last::Message(chunk(0)), admitted(&admission));
        admission.close();
        assert!(admission.empty().now_or_never().is_none());
        outgoing.next().await.unwrap().unwrap();
        assert_eq!(delivery.taken().await, Ok(Taken::More));
        assert!(admission.empty().now_or_never().is_none());
        outgoing.next().await.unwrap().unwrap();
        assert!(admission.empty().now_or_never().is_some());
        assert_eq!(delivery.taken().await, Ok(Taken::End));
        assert!(outgoing.next().await.is_none());
        drop(outgoing);
        assert_eq!(
            delivery.taken().await,
            Ok(Taken::End),
            "who read it all did not leave"
        );
    }

    #[tokio::test]
    async fn what_is_given_up_is_freed_before_the_caller_reads_on() {
        let admission = Arc::new(Admission::new(1));
        let (mut delivery, mut outgoing) = delivery();
        fill(&delivery, 100);
        delivery.end(Last::Message(chunk(0)), admitted(&admission));
        delivery.give_up(status());
        admission.close();
        assert!(admission.empty().now_or_never().is_some());
        assert!(delivery.queue.lock().messages.is_empty());
        let end = outgoing.next().await.unwrap().unwrap_err();
        assert_eq!(end.code(), tonic::Code::Cancelled);
        assert!(outgoing.next().await.is_none());
        delivery.give_up(status());
        assert!(outgoing.next().await.is_none(), "a stream ends once");
        assert_eq!(delivery.taken().await, Ok(Taken::End));
    }

    #[tokio::test]
    async fn a_caller_who_leaves_is_noticed_and_frees_the_ticket() {
        let admission = Arc::new(Admission::new(1));
        let (mut delivery, outgoing) = delivery();
        fill(&delivery, 100);
        delivery.end(Last::Message(chunk(0)), admitted(&admission));
        assert!(delivery.gone().now_or_never().is_none());
        drop(outgoing);
        delivery.gone().await;
        assert_eq!(delivery.room().await, Err(Gone));
        assert_eq!(delivery.taken().await, Err(Gone));
        admission.close();
        assert!(admission.empty().now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_relay_that_dies_does_not_end_its_stream_well() {
        let (delivery, mut outgoing) = delivery::<v1::SynthesizeResponse>();
        let waiting = tokio::spawn(async move { outgoing.next().await });
        tokio::task::yield_now().await;
        drop(delivery);
        let end = waiting.await.unwrap().unwrap().unwrap_err();
        assert_eq!(end.code(), tonic::Code::Internal);
    }
}
