package components

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/components/requestreply"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

type BookRoom struct {
	Room   string
	Guests int
}

type RoomBooked struct{ Room string }

func (b *bundle) commandBus(t *testing.T) *cqrs.CommandBus {
	t.Helper()
	bus, err := cqrs.NewCommandBusWithConfig(b.pub, cqrs.CommandBusConfig{
		GeneratePublishTopic: func(p cqrs.CommandBusGeneratePublishTopicParams) (string, error) {
			return "commands." + p.CommandName, nil
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	require.NoError(t, err)
	return bus
}

func (b *bundle) commands(t *testing.T, handlers ...cqrs.CommandHandler) {
	t.Helper()
	p, err := cqrs.NewCommandProcessorWithConfig(b.router, cqrs.CommandProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) {
			return "commands." + p.CommandName, nil
		},
		SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return b.subscriber(t), nil
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	require.NoError(t, err)
	require.NoError(t, p.AddHandlers(handlers...))
}

func (b *bundle) eventBus(t *testing.T, pub message.Publisher) *cqrs.EventBus {
	t.Helper()
	bus, err := cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return "events." + p.EventName, nil },
		Marshaler:            cqrs.JSONMarshaler{},
	})
	require.NoError(t, err)
	return bus
}

// A command's handler publishes an event; both handlers fail once.
func TestCommandsAndEvents(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var calls tries
	events := b.eventBus(t, b.pub)
	b.commands(t, cqrs.NewCommandHandler("book", func(ctx context.Context, cmd *BookRoom) error {
		if calls.add("command") == 1 {
			return errHandler
		}
		return events.Publish(ctx, &RoomBooked{Room: cmd.Room})
	}))
	handled := make(chan string, 10)
	p, err := cqrs.NewEventProcessorWithConfig(b.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
			return "events." + p.EventName, nil
		},
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return b.subscriber(t), nil
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	require.NoError(t, err)
	require.NoError(t, p.AddHandlers(cqrs.NewEventHandler("booked", func(_ context.Context, e *RoomBooked) error {
		if calls.add("event") == 1 {
			return errHandler
		}
		handled <- e.Room
		return nil
	})))
	b.run(t)
	require.NoError(t, b.commandBus(t).Send(t.Context(), &BookRoom{Room: "42", Guests: 2}))
	require.Equal(t, "42", next(t, handled))
	outcomes := map[string]int{}
	for range 4 {
		outcomes[next(t, b.settled).Outcome]++
	}
	require.Equal(t, map[string]int{"retried": 2, "acked": 2}, outcomes)
	b.requireSettled(t, 0, "", 0)
}

// The context that InTx gives takes a shared bus into the transaction; a bus on the transaction's publisher is in it anyway.
func TestEventBusJoinsTheTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	shared := b.eventBus(t, b.pub)
	received := b.messages(t, "events.components.RoomBooked")
	publish := func(end error) error {
		return b.pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
			own := b.eventBus(t, pub)
			return errors.Join(shared.Publish(ctx, &RoomBooked{Room: "1"}), own.Publish(ctx, &RoomBooked{Room: "2"}), end)
		})
	}
	require.ErrorIs(t, publish(errHandler), errHandler)
	require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
	require.NoError(t, publish(nil))
	for range 2 {
		ack(t, received)
	}
	b.requireSettled(t, 2, "acked", 0)

	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, shared.Publish(pgmill.WithTx(t.Context(), tx), &RoomBooked{Room: "3"}))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
}

// Every request makes a Subscriber that nobody closes: the end of its context frees what it had.
func TestRequestReplyFreesItsSubscribers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	timeout := limit
	backend, err := requestreply.NewPubSubBackend[int](requestreply.PubSubBackendConfig{
		Publisher: b.pub,
		SubscriberConstructor: func(requestreply.PubSubBackendSubscribeParams) (message.Subscriber, error) {
			return b.subscriber(t), nil
		},
		GeneratePublishTopic: func(p requestreply.PubSubBackendPublishParams) (string, error) {
			return "replies." + string(p.OperationID), nil
		},
		GenerateSubscribeTopic: func(p requestreply.PubSubBackendSubscribeParams) (string, error) {
			return "replies." + string(p.OperationID), nil
		},
		ListenForReplyTimeout: &timeout,
		AckCommandErrors:      true,
	}, requestreply.BackendPubsubJSONMarshaler[int]{})
	require.NoError(t, err)
	b.commands(t, requestreply.NewCommandHandlerWithResult("book", backend, func(_ context.Context, cmd *BookRoom) (int, error) {
		if cmd.Room == "" {
			return 0, errHandler
		}
		return cmd.Guests * 100, nil
	}))
	b.run(t)
	bus := b.commandBus(t)
	const requests = 20
	for i := range requests {
		reply, err := requestreply.SendWithReply[int](t.Context(), bus, backend, &BookRoom{Room: "42", Guests: i})
		require.NoError(t, err)
		require.NoError(t, reply.Error)
		require.Equal(t, i*100, reply.HandlerResult)
	}
	reply, err := requestreply.SendWithReply[int](t.Context(), bus, backend, &BookRoom{})
	require.NoError(t, err)
	require.ErrorContains(t, reply.Error, errHandler.Error())
	b.requireSettled(t, 2*requests+2, "acked", 0)
	require.Eventually(t, func() bool { return len(b.client.Health().Subscriptions) == 1 }, limit, 10*time.Millisecond,
		"the command handler's subscription alone is left")
	require.Zero(t, b.pool.Stat().AcquiredConns())
}
