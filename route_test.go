package pgmill

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
	"github.com/pgmill/pgmill/marshaler"
)

func claimTable(name string) claimshape.Table { return claimshape.Table{Name: name} }

func TestRouteExactBeatsTheLongestPrefix(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P33")
	c := Config{Routes: map[string]Route{
		"audit.eu.*": {Table: claimTable("eu")}, "audit.*": {Table: claimTable("audit")}, "a.*": {Table: claimTable("a")},
		"audit.eu.login": {Table: claimTable("login")}, "*": {Table: claimTable("rest")}, "audit.": {Table: claimTable("dot")},
	}}
	c.setDefaults()
	require.NoError(t, c.check())
	routes := newRoutes(&c, claimshape.Link{})
	for topic, table := range map[string]string{
		"audit.eu.login": "login", "audit.eu.logins": "eu", "audit.eu.": "eu", "audit.eu": "audit", "audit.us.login": "audit",
		"audit.": "dot", "audit": "rest", "a.": "a", "a": "rest", "ab": "rest", "Audit.x": "rest", "*": "rest", "orders": "rest",
	} {
		q, err := routes.find(topic)
		require.NoError(t, err, topic)
		require.Equal(t, table, q.table.Name, topic)
	}
	require.Len(t, routes.all(), 6)

	delete(c.Routes, "*")
	routes = newRoutes(&c, claimshape.Link{})
	for _, topic := range []string{"orders", "audit", "a", "audi.x"} {
		_, err := routes.find(topic)
		require.ErrorIs(t, err, ErrNoRoute, topic)
	}
}

// upside is a marshaler that a route has of its own: it stores the payload reversed.
type upside struct{ marshaler.Marshaler }

func (u upside) Marshal(topic string, msg *message.Message, rec *marshaler.Record) error {
	if err := u.Marshaler.Marshal(topic, msg, rec); err != nil {
		return err
	}
	rec.Payload = reversed(rec.Payload)
	return nil
}

func (u upside) Unmarshal(row marshaler.Row, msg *message.Message) error {
	err := u.Marshaler.Unmarshal(row, msg)
	msg.Payload = reversed(msg.Payload)
	return err
}

func reversed(b []byte) []byte {
	r := make([]byte, len(b))
	for i := range b {
		r[len(b)-1-i] = b[i]
	}
	return r
}

// Publisher and Subscriber find the same table by the topic, in schemas and under names that need quotes.
func TestRoutesEndToEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P8", "P33", "FP8")
	r := newRig(t, emptySearchPath)
	r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{
		"orders":  {Table: claimshape.Table{Schema: "App-1", Name: `Order "queue"`}},
		"audit.*": {Table: claimTable("audit.log"), Marshaler: upside{marshaler.Default()}},
	}})
	pub := r.publisher(t)
	orders, audit := r.subscribe(t, "orders", SubscriberConfig{}), r.subscribe(t, "audit.login", SubscriberConfig{})
	require.NoError(t, pub.Publish("orders", text("order")))
	require.NoError(t, pub.Publish("audit.login", text("login")))
	err := pub.Publish("other", text("lost"))
	require.ErrorIs(t, err, ErrNoRoute)
	require.ErrorContains(t, err, `publish "other": no route`)
	_, err = r.subscriber(t, SubscriberConfig{}).Subscribe(t.Context(), "other")
	require.ErrorIs(t, err, ErrNoRoute)

	order, login := await(t, orders), await(t, audit)
	require.Equal(t, "order", string(order.Payload))
	require.Equal(t, "login", string(login.Payload))
	d, _ := DeliveryFromContext(order.Context())
	require.Equal(t, `App-1.Order "queue"`, d.Table)
	stored := func(table string) int64 {
		return r.db.QueryInt(t, fmt.Sprintf("SELECT count(*) FROM %s WHERE payload IN ('order', 'nigol')", table))
	}
	require.EqualValues(t, 1, stored(`"App-1"."Order ""queue"""`))
	require.EqualValues(t, 1, stored(`public."audit.log"`))
	require.Zero(t, r.db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname = 'pgmill_messages'"))

	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, inside *TxPublisher) error {
		require.ErrorIs(t, inside.Publish("other", text("lost")), ErrNoRoute)
		return inside.Publish("audit.login", text("login"))
	}))
	require.EqualValues(t, 2, stored(`public."audit.log"`), "the marshaler of the route is used in a transaction too")
	order.Ack()
	login.Ack()
	await(t, audit).Ack()
}

// Names that differ only in case, or in what quoting would hide, are tables of their own.
func TestTableNamesAreNotFolded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP5")
	r := newRig(t)
	names := []string{"Queue", "queue", "QUEUE", "a-b", "a b", `q"`, "SELECT", "%s", "$1", "x/y", ";drop", " sp", "Ünï", "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn"}
	routes := map[string]Route{}
	for _, name := range names {
		routes[name] = Route{Table: claimTable(name)}
	}
	r.open(t, Config{Routes: routes})
	pub := r.publisher(t)
	for i, name := range names {
		require.NoError(t, pub.Publish(name, numbered(i+1)...), name)
	}
	for i, name := range names {
		require.EqualValues(t, i+1, r.db.QueryInt(t, "SELECT count(*) FROM public."+pgx.Identifier{name}.Sanitize()), name)
	}
}

// A producer of a Router's handler lands in the table that its topic is routed to.
func TestRepliesAreRouted(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P8")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{
		"requests": {}, "replies.*": {Table: claimTable("replies")},
	}})
	pub := r.publisher(t)
	run(t, func(router *message.Router) {
		router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{}), "replies.eu", pub,
			func(msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{text("first of " + msg.UUID), text("second of " + msg.UUID)}, nil
			})
	})
	require.NoError(t, pub.Publish("requests", text("a")))
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM public.replies WHERE topic = 'replies.eu'"))
	require.Zero(t, r.rows(t))
}
