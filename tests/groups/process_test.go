package groups

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

type (
	RoomBooked    struct{ ID int }
	RoomCancelled struct{ ID int }
)

var kinds = map[string]func(*consumer) error{
	"plain": (*consumer).plain, "processor": (*consumer).processor, "group processor": (*consumer).groupProcessor,
}

// consumer is one member of each group, mailer and ledger. It writes what it handled into a table.
type consumer struct {
	pool   *pgxpool.Pool
	client *pgmill.Client
	router *message.Router
}

// consumerChild is a process of some members of each group.
func consumerChild() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("GROUPS_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(ctx, pool, pgmill.Config{Notify: pgmill.ListenNotify}, nil)
	if err != nil {
		log.Fatal(err)
	}
	members, _ := strconv.Atoi(os.Getenv("GROUPS_MEMBERS"))
	for range members {
		router, err := message.NewRouter(message.RouterConfig{}, nil)
		if err != nil {
			log.Fatal(err)
		}
		if err := kinds[os.Getenv("GROUPS_KIND")](&consumer{pool: pool, client: client, router: router}); err != nil {
			log.Fatal(err)
		}
		go func() { log.Fatal(router.Run(ctx)) }()
		<-router.Running()
	}
	fmt.Println("ready")
	select {}
}

func (c *consumer) handled(ctx context.Context, group, event string, id int) error {
	_, err := c.pool.Exec(ctx, "INSERT INTO handled (consumer_group, event, id, pid) VALUES ($1, $2, $3, $4)", group, event, id, os.Getpid())
	return err
}

func (c *consumer) member(group string) (message.Subscriber, error) {
	return c.client.NewSubscriber(pgmill.SubscriberConfig{ConsumerGroup: group})
}

func (c *consumer) plain() error {
	for _, group := range []string{"mailer", "ledger"} {
		sub, err := c.member(group)
		if err != nil {
			return err
		}
		c.router.AddConsumerHandler(group, "events", sub, func(msg *message.Message) error {
			event := cqrs.JSONMarshaler{}.NameFromMessage(msg)
			var e struct{ ID int }
			if err := (cqrs.JSONMarshaler{}).Unmarshal(msg, &e); err != nil {
				return err
			}
			return c.handled(msg.Context(), group, event, e.ID)
		})
	}
	return nil
}

func (c *consumer) processor() error {
	p, err := cqrs.NewEventProcessorWithConfig(c.router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
		SubscriberConstructor: func(p cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return c.member(p.HandlerName)
		},
		AckOnUnknownEvent: true,
		Marshaler:         cqrs.JSONMarshaler{},
	})
	if err != nil {
		return err
	}
	return p.AddHandlers(
		cqrs.NewEventHandler("mailer", func(ctx context.Context, e *RoomBooked) error {
			return c.handled(ctx, "mailer", "groups.RoomBooked", e.ID)
		}),
		cqrs.NewEventHandler("ledger", func(ctx context.Context, e *RoomBooked) error {
			return c.handled(ctx, "ledger", "groups.RoomBooked", e.ID)
		}),
	)
}

func (c *consumer) groupProcessor() error {
	p, err := cqrs.NewEventGroupProcessorWithConfig(c.router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
		SubscriberConstructor: func(p cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return c.member(p.EventGroupName)
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	if err != nil {
		return err
	}
	for _, group := range []string{"mailer", "ledger"} {
		if err := p.AddHandlersGroup(group,
			cqrs.NewGroupEventHandler(func(ctx context.Context, e *RoomBooked) error {
				return c.handled(ctx, group, "groups.RoomBooked", e.ID)
			}),
			cqrs.NewGroupEventHandler(func(ctx context.Context, e *RoomCancelled) error {
				return c.handled(ctx, group, "groups.RoomCancelled", e.ID)
			}),
		); err != nil {
			return err
		}
	}
	return nil
}

// Three members of each of two groups, in two processes: each group handles each event once.
func TestGroupsOfTwoProcessesHandleEachEventOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25")
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, "CREATE TABLE handled (consumer_group text, event text, id int, pid int)")
			for _, members := range []string{"2", "1"} {
				child := pgtest.Child(t, "consumer", "GROUPS_DSN="+db.DSN, "GROUPS_KIND="+kind, "GROUPS_MEMBERS="+members)
				require.Equal(t, "ready", child.Line(t))
			}
			pool := db.Pool(t)
			client, err := pgmill.Open(t.Context(), pool, pgmill.Config{Notify: pgmill.NotifyOnly}, nil)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, client.Close()) })
			pub, err := client.NewPublisher(pgmill.PublisherConfig{})
			require.NoError(t, err)
			bus, err := cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
				GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "events", nil },
				Marshaler:            cqrs.JSONMarshaler{},
			})
			require.NoError(t, err)
			events := int64(2)
			if kind == "processor" { // its handlers know one event and pass the other by
				events = 1
			}
			n := int64(0)
			until(t, "both processes work for both groups", func() bool {
				for range 20 {
					require.NoError(t, bus.Publish(t.Context(), &RoomBooked{ID: int(n)}))
					require.NoError(t, bus.Publish(t.Context(), &RoomCancelled{ID: int(n)}))
					n++
				}
				return n >= 60 && db.QueryInt(t, "SELECT count(*) FROM (SELECT DISTINCT consumer_group, pid FROM handled) AS h") == 4
			})
			until(t, "everything is acknowledged", func() bool {
				return db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages") == 0
			})
			require.Equal(t, 2*events*n, db.QueryInt(t, "SELECT count(*) FROM handled"))
			require.Equal(t, 2*events*n, db.QueryInt(t, "SELECT count(*) FROM (SELECT DISTINCT consumer_group, event, id FROM handled) AS h"))
		})
	}
}
