package components

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

var errHandler = errors.New("handler failed")

func attempt(msg *message.Message) int64 {
	d, _ := pgmill.DeliveryFromContext(msg.Context())
	return d.Attempt
}

func TestRetryRepeatsWithinOneDelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var calls tries
	attempts := make(chan int64, 10)
	b.router.AddMiddleware(middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware)
	b.consume(t, "orders", func(msg *message.Message) error {
		attempts <- attempt(msg)
		if calls.add(msg.UUID) < 3 {
			return errHandler
		}
		return nil
	})
	b.run(t)
	b.publish(t, "orders", "a")
	for range 3 {
		require.EqualValues(t, 1, next(t, attempts))
	}
	b.requireSettled(t, 1, "acked", 0)
}

func TestRetryThatGivesUpLeavesTheRestToTheTable(t *testing.T) {
	t.Parallel()
	b := setup(t)
	attempts := make(chan int64, 10)
	b.router.AddMiddleware(middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}.Middleware)
	b.consume(t, "orders", func(msg *message.Message) error {
		attempts <- attempt(msg)
		if attempt(msg) < 3 {
			return errHandler
		}
		return nil
	})
	b.run(t)
	b.publish(t, "orders", "a")
	for _, want := range []int64{1, 1, 2, 2, 3} {
		require.Equal(t, want, next(t, attempts))
	}
	require.Equal(t, "retried", next(t, b.settled).Outcome)
	require.Equal(t, "retried", next(t, b.settled).Outcome)
	b.requireSettled(t, 1, "acked", 0)
}

func TestPoisonQueueParksTheMessage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	b.router.AddMiddleware(poison)
	b.consume(t, "orders", func(*message.Message) error { return errors.New("cannot read \x00\xff") })
	parked := b.messages(t, "poison")
	b.run(t)
	msg := message.NewMessage("a", []byte("\x00\xff payload"))
	msg.Metadata.Set("key", "value")
	require.NoError(t, b.pub.Publish("orders", msg))
	got := ack(t, parked)
	require.Equal(t, "a", got.UUID)
	require.Equal(t, msg.Payload, got.Payload)
	require.Equal(t, message.Metadata{
		"key": "value", middleware.ReasonForPoisonedKey: "cannot read \ufffd\ufffd", middleware.PoisonedTopicKey: "orders",
		middleware.PoisonedHandlerKey: "orders handler", middleware.PoisonedSubscriberKey: "pgmill.Subscriber",
	}, got.Metadata)
	b.requireSettled(t, 2, "acked", 0)
}

func TestRecovererMakesAPanicANack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.router.AddMiddleware(middleware.Recoverer)
	b.consume(t, "orders", func(msg *message.Message) error {
		if attempt(msg) == 1 {
			panic("in the handler")
		}
		return nil
	})
	b.run(t)
	b.publish(t, "orders", "a")
	require.Equal(t, "retried", next(t, b.settled).Outcome)
	b.requireSettled(t, 1, "acked", 0)
}

func TestCorrelationIDIsHandedOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.router.AddMiddleware(middleware.CorrelationID)
	b.router.AddHandler("reply", "requests", b.subscriber(t), "replies", b.pub, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("reply", msg.Payload)}, nil
	})
	replies := b.messages(t, "replies")
	b.run(t)
	request := message.NewMessage("a", nil)
	middleware.SetCorrelationID("4711", request)
	require.NoError(t, b.pub.Publish("requests", request))
	require.Equal(t, "4711", middleware.MessageCorrelationID(ack(t, replies)))
	b.requireSettled(t, 2, "acked", 0)
}

// keys is a repository for the Deduplicator without the goroutine that Watermill's never ends.
type keys struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (k *keys) IsDuplicate(_ context.Context, key string) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	seen := k.seen[key]
	if k.seen == nil {
		k.seen = map[string]bool{}
	}
	k.seen[key] = true
	return seen, nil
}

func deduplicator() *middleware.Deduplicator {
	return &middleware.Deduplicator{KeyFactory: middleware.NewMessageHasherSHA256(1 << 20), Repository: &keys{}, Timeout: time.Second}
}

func TestDeduplicatorMiddlewareDropsDuplicates(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handled := make(chan string, 10)
	b.router.AddMiddleware(deduplicator().Middleware)
	b.consume(t, "orders", func(msg *message.Message) error { handled <- msg.UUID; return nil })
	b.run(t)
	b.publish(t, "orders", "a", "a", "b", "a")
	b.requireSettled(t, 4, "acked", 0)
	require.ElementsMatch(t, []string{"a", "b"}, []string{next(t, handled), next(t, handled)})
	require.Empty(t, handled)
}

// Where all messages of a call are duplicates, the decorator publishes none.
func TestDeduplicatorDecoratorPublishesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	pub, err := deduplicator().PublisherDecorator()(b.pub)
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, pub.Publish("orders", message.NewMessage("1", []byte("a")), message.NewMessage("2", []byte("b"))))
	}
	require.EqualValues(t, 2, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
}

func TestDuplicatorPublishesTheSameTwice(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.router.AddMiddleware(middleware.Duplicator)
	b.router.AddHandler("pass", "orders", b.subscriber(t), "copies", b.pub, message.PassthroughHandler)
	copies := b.messages(t, "copies")
	b.run(t)
	b.publish(t, "orders", "a")
	for range 2 {
		require.Equal(t, "a", string(ack(t, copies).Payload))
	}
	b.requireSettled(t, 3, "acked", 0)
}

// A failing handler's message goes to the poison queue, and the requeuer brings it back.
func TestRequeuerBringsPoisonedMessagesBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	handled := make(chan *message.Message, 10)
	handler := b.router.AddConsumerHandler("orders", "orders", b.subscriber(t), func(msg *message.Message) error {
		if msg.Metadata.Get(requeuer.RetriesKey) != "2" {
			return errHandler
		}
		handled <- msg
		return nil
	})
	handler.AddMiddleware(poison)
	_, err = requeuer.NewRequeuer(requeuer.Config{
		Subscriber: b.subscriber(t), SubscribeTopic: "poison", Publisher: b.pub, Router: b.router, Delay: time.Millisecond,
		GeneratePublishTopic: func(p requeuer.GeneratePublishTopicParams) (string, error) {
			return p.Message.Metadata.Get(middleware.PoisonedTopicKey), nil
		},
	}, nil)
	require.NoError(t, err)
	b.run(t)
	b.publish(t, "orders", "a")
	msg := next(t, handled)
	require.Equal(t, "a", string(msg.Payload))
	require.Equal(t, errHandler.Error(), msg.Metadata.Get(middleware.ReasonForPoisonedKey))
	b.requireSettled(t, 5, "acked", 0)
}

// Timeout, inside, ends the message's context. The handler that passes the message on publishes under the delivery's.
func TestTimeoutDoesNotStopThePoisonQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	b.router.AddMiddleware(poison, middleware.Timeout(time.Millisecond))
	b.consume(t, "orders", func(msg *message.Message) error {
		<-msg.Context().Done()
		return msg.Context().Err()
	})
	parked := b.messages(t, "poison")
	b.run(t)
	b.publish(t, "orders", "a")
	require.Equal(t, context.DeadlineExceeded.Error(), ack(t, parked).Metadata.Get(middleware.ReasonForPoisonedKey))
	b.requireSettled(t, 2, "acked", 0)
}
