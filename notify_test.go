package pgmill

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// notifications counts the notify statements of a trace.
func notifications(tr pgtest.Trace) (n int) {
	for _, step := range steps(tr) {
		if step == "Notify" {
			n++
		}
	}
	return n
}

func TestNotifyModesHaveNames(t *testing.T) {
	t.Parallel()
	require.Equal(t, "NotifyOff ListenNotify NotifyOnly unknown", fmt.Sprint(NotifyOff, ListenNotify, NotifyOnly, NotifyMode(3)))
}

func TestNotifyIntervalAnnouncesTogether(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W40", "FN12")
	r := newRig(t, behindProxy)
	client := r.open(t, Config{Notify: NotifyOnly, NotifyInterval: time.Hour})
	pub := r.warm(t)
	r.proxy.ResetTrace()
	for range 100 {
		require.NoError(t, pub.Publish("orders", numbered(2)...))
		require.NoError(t, pub.Publish("other", text("a")))
	}
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *TxPublisher) error {
		return pub.Publish("third", text("a"))
	}))
	require.Zero(t, notifications(r.proxy.Trace()), "within the interval")
	client.notifier.flush(t.Context(), client)
	require.Equal(t, 1, notifications(r.proxy.Trace()), "all topics together")
	client.notifier.flush(t.Context(), client)
	require.Equal(t, 1, notifications(r.proxy.Trace()), "nothing is left")
	require.NoError(t, pub.Publish("orders", text("a")))
	require.NoError(t, client.Wake(t.Context(), "orders"))
	require.Equal(t, 2, notifications(r.proxy.Trace()), "Wake does not wait")
	require.NoError(t, pub.Close())
	require.Equal(t, 3, notifications(r.proxy.Trace()), "Publisher.Close sends what waits")
	pub = r.publisher(t)
	require.NoError(t, pub.Publish("orders", text("a")))
	require.NoError(t, client.Close())
	require.Equal(t, 4, notifications(r.proxy.Trace()), "Client.Close sends what waits")
	require.Nil(t, client.notifier.sent, "no timer is left")
}

func TestNotifyIntervalSendsAtItsEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W40")
	r := newRig(t, behindProxy)
	r.open(t, Config{Notify: NotifyOnly, NotifyInterval: 50 * time.Millisecond})
	pub := r.warm(t)
	r.proxy.ResetTrace()
	for i := range 2 {
		require.NoError(t, pub.Publish("orders", text("a")))
		require.Eventually(t, func() bool { return notifications(r.proxy.Trace()) == i+1 }, 20*time.Second, time.Millisecond)
	}
}

// What came while a notification was being sent is not left to the next interval.
func TestCloseSendsWhatCameWhileNotifying(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W40")
	r := newRig(t, behindProxy)
	client := r.open(t, Config{Notify: NotifyOnly, NotifyInterval: time.Hour})
	pub := r.warm(t)
	r.proxy.ResetTrace()
	require.NoError(t, pub.Publish("orders", text("a")))
	held, release := r.proxy.Hold("-- Notify")
	defer release()
	sent := make(chan struct{})
	go func() { defer close(sent); client.notifier.flush(t.Context(), client) }() // as the timer does
	awaitClosed(t, held)
	require.NoError(t, pub.Publish("orders", text("b")))
	closed := make(chan error, 1)
	go func() { closed <- pub.Close() }()
	release()
	require.NoError(t, await(t, closed))
	awaitClosed(t, sent)
	require.Equal(t, 2, notifications(r.proxy.Trace()))
}

func TestNotifyTriggerIsTheTablesOwn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W9")
	require.Contains(t, NotifyTrigger(claimshape.Table{Schema: "App", Name: "it's"}), `"App"."it's"`)
	require.Contains(t, NotifyTrigger(claimshape.Table{Schema: "App", Name: "it's"}), `E'App.it\'s'`)
}

// A publish under way when the client closes is notified by itself: no timer may outlive Close.
func TestPublishThatOutlivesTheClientNotifiesAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W40")
	r := newRig(t, behindProxy, maxConns(1))
	client := r.open(t, Config{Notify: NotifyOnly, NotifyInterval: time.Hour})
	pub := r.warm(t)
	r.proxy.ResetTrace()
	held, release := r.proxy.Hold("INSERT INTO")
	defer release()
	published := make(chan error, 1)
	go func() { published <- pub.Publish("orders", text("a")) }()
	awaitClosed(t, held)
	require.NoError(t, client.Close())
	require.Zero(t, notifications(r.proxy.Trace()))
	release()
	require.NoError(t, await(t, published))
	require.Equal(t, 1, notifications(r.proxy.Trace()))
	require.Nil(t, client.notifier.sent, "no timer is left")
	require.Empty(t, r.logs.errors())
}
