package pgmill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	defaultConcurrency  = 10
	maxConcurrency      = 10_000
	maxBatch            = 10_000
	defaultCloseTimeout = 10 * time.Second

	// A row that is no message stays, and comes back after this, because nothing is deleted unless asked.
	undecodableDelay = time.Minute

	maxTopic = 1024 // bytes; an index entry ends at 2704
)

// SubscriberConfig says how a Subscriber's subscriptions work. The zero SubscriberConfig is a good one.
type SubscriberConfig struct {
	// Transactional gives each delivery, or each batch, a transaction that handlers under the Transaction middleware write
	// in, and that the Ack commits. It takes a connection of the pool for each. Defaults to false.
	Transactional bool

	// ConsumerGroup names a fan-out subscription that is durable: every group gets each message that is published after it
	// was registered, by the first Subscribe or SubscribeInitialize of any process; the subscribers of one group compete.
	// It has up to 255 bytes. Defaults to the unnamed group, which is one like the others.
	ConsumerGroup string

	// ConsumerGroupFunc gives the group of each topic, in place of ConsumerGroup.
	ConsumerGroupFunc func(topic string) string

	// Concurrency is how many messages of one subscription are with handlers at once, or with Batch how many batches.
	// Defaults to 10, and to 1 with Batch. With 1 the subscription is a single stream: the next message comes after the
	// Ack or Nack of the last. In a table of shape RowLock each takes a connection of the pool.
	Concurrency int

	// Batch is how many messages one claim takes at most, for a handler made with the function Batch or BatchEach, which
	// gets them together. They do not wait for the batch to fill. Defaults to 0: messages are delivered one by one.
	Batch int

	// BatchWait is how long a subscription with Batch that is woken waits before it claims: without it a steady trickle
	// makes batches of one. Defaults to 0.
	BatchWait time.Duration

	// PollInterval is how long an idle subscription waits for a wake before it looks by itself: it finds rows that other
	// programs wrote, and rows of processes that crashed. Defaults to the client's, which defaults to 1s.
	PollInterval time.Duration

	// Backoff is the delay of a message after its Nack; attempt is 1 after the first delivery. Defaults to exponential
	// with jitter, from 100ms to 1 minute. NoBackoff brings messages back at once.
	Backoff func(attempt int) time.Duration

	// OnUndecodable is what happens to a row that the Marshaler cannot make a message of: Discard, Retry, RetryAfter
	// or DeadLetter. Defaults to DeadLetter where there is one, and else to RetryAfter(1 minute): the row stays and comes
	// back, with an error log each time and a count in Health.
	OnUndecodable Outcome

	// MaxAttempts is how often a message is delivered at most, the first time included. What is not acknowledged then is a
	// dead letter, even if its process died. Defaults to 0, no limit; needs DeadLetter.
	MaxAttempts int

	// DeadLetter is where messages go after MaxAttempts deliveries, or by the outcome DeadLetter: Topic or IntoTable. They
	// get the metadata of Watermill's poison queue (reason, topic, handler, subscriber) and start again at attempt 1; see
	// Client.Requeue. A message is in exactly one place at any time. Needs MaxAttempts.
	DeadLetter Destination

	// MaxHold is how long a message may be with its handler. After it the lease is not extended any more: the message's
	// context ends with ErrLeaseLost, its slot is free, and it comes again when the lease ends. Set it where a handler may
	// hang: a Router does not notice one that never returns, or that ends its goroutine. Defaults to 0, no limit.
	MaxHold time.Duration

	// CloseTimeout is how long Close, or the end of Subscribe's context, waits for messages that are with handlers.
	// After it their contexts end with ErrShutdown and they are released. Defaults to 10s, negative: do not wait. Keep it
	// under the Router's CloseTimeout, which is 30s.
	CloseTimeout time.Duration
}

// Subscriber receives messages of topics. It implements message.Subscriber and message.SubscribeInitializer. It is cheap:
// what is known about tables belongs to the client that all Subscribers and Publishers of a pool share.
type Subscriber struct {
	client *Client
	config SubscriberConfig
	log    watermill.LoggerAdapter

	mu     sync.Mutex
	closed bool
	subs   map[*subscription]struct{}
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber makes a Subscriber on pool, which stays the caller's. It asks nothing of the database. A nil logger logs
// nothing. An error names each field that is wrong.
func NewSubscriber(pool *pgxpool.Pool, c SubscriberConfig, logger watermill.LoggerAdapter) (*Subscriber, error) {
	client, err := clientOf(pool)
	if err != nil {
		return nil, fmt.Errorf("new subscriber: %w", err)
	}
	return client.newSubscriber(c, logger)
}

// NewSubscriber makes a Subscriber that logs with the client's logger.
func (c *Client) NewSubscriber(config SubscriberConfig) (*Subscriber, error) {
	return c.newSubscriber(config, c.logger())
}

func (c *Client) newSubscriber(config SubscriberConfig, logger watermill.LoggerAdapter) (*Subscriber, error) {
	config.setDefaults()
	err := config.check()
	if config.Transactional {
		err = errors.Join(err, c.checkTransactional())
	}
	if err != nil {
		return nil, fmt.Errorf("new subscriber: %w", err)
	}
	return &Subscriber{client: c, config: config, log: orNop(logger), subs: map[*subscription]struct{}{}}, nil
}

func (c *Client) checkTransactional() error {
	if max := c.pool.Config().MaxConns; max < 2 {
		return fmt.Errorf("SubscriberConfig.Transactional holds a connection, the pool's MaxConns is %d and must be at least 2", max)
	}
	return nil
}

func (c *SubscriberConfig) setDefaults() {
	if c.Concurrency == 0 {
		c.Concurrency = defaultConcurrency
		if c.Batch > 0 {
			c.Concurrency = 1
		}
	}
	if c.Backoff == nil {
		c.Backoff = defaultBackoff
	}
	if c.OnUndecodable.kind == outcomeNone {
		c.OnUndecodable = RetryAfter(undecodableDelay)
		if c.DeadLetter.kind != nowhere {
			c.OnUndecodable = DeadLetter("not decodable")
		}
	}
	if c.CloseTimeout == 0 {
		c.CloseTimeout = defaultCloseTimeout
	}
}

func (c *SubscriberConfig) check() error {
	var problems []error
	if c.Concurrency < 1 || c.Concurrency > maxConcurrency {
		problems = append(problems, fmt.Errorf("SubscriberConfig.Concurrency %d: not between 1 and %d", c.Concurrency, maxConcurrency))
	}
	if c.Batch < 0 || c.Batch > maxBatch {
		problems = append(problems, fmt.Errorf("SubscriberConfig.Batch %d: not between 0 and %d", c.Batch, maxBatch))
	}
	if c.BatchWait < 0 || c.BatchWait > 0 && c.Batch == 0 {
		problems = append(problems, fmt.Errorf("SubscriberConfig.BatchWait %v: needs a Batch and is not negative", c.BatchWait))
	}
	if c.ConsumerGroup != "" && c.ConsumerGroupFunc != nil {
		problems = append(problems, errors.New("SubscriberConfig.ConsumerGroup and ConsumerGroupFunc: only one of them"))
	}
	if err := checkGroup(c.ConsumerGroup); err != nil {
		problems = append(problems, fmt.Errorf("SubscriberConfig.ConsumerGroup: %w", err))
	}
	if c.PollInterval < 0 {
		problems = append(problems, fmt.Errorf("SubscriberConfig.PollInterval %v: negative", c.PollInterval))
	}
	if c.MaxAttempts < 0 {
		problems = append(problems, fmt.Errorf("SubscriberConfig.MaxAttempts %d: negative", c.MaxAttempts))
	}
	if (c.MaxAttempts > 0) != (c.DeadLetter.kind != nowhere) {
		problems = append(problems, fmt.Errorf("SubscriberConfig.MaxAttempts %d and DeadLetter to %v: one needs the other",
			c.MaxAttempts, c.DeadLetter))
	}
	if err := c.DeadLetter.check(); err != nil {
		problems = append(problems, fmt.Errorf("SubscriberConfig.DeadLetter: %w", err))
	}
	if c.OnUndecodable.kind == outcomeDeadLetter && c.DeadLetter.kind == nowhere {
		problems = append(problems, errors.New("SubscriberConfig.OnUndecodable is DeadLetter, and there is no DeadLetter"))
	}
	if c.MaxHold < 0 {
		problems = append(problems, fmt.Errorf("SubscriberConfig.MaxHold %v: negative", c.MaxHold))
	}
	return errors.Join(problems...)
}

// Subscribe delivers the topic's messages on the channel until ctx ends or the Subscriber is closed; then the channel is
// closed, after the drain. The values of ctx are in every message's context; its end is not: messages that are with
// handlers have CloseTimeout to settle.
//
// It creates the default table where it is missing (see Config.NoMigrate), registers the consumer group, and needs the
// database for that; after an error the call can be repeated, and at most the table and the registration are left behind.
// In the first 5 seconds of a group it waits, until they are over, for transactions that may have published without it:
// what is committed after Subscribe has returned is the group's, unless its transaction was open all that time. Later
// outages are survived: the channel stays open.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	sub, err := s.subscribe(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("subscribe %q: %w", topic, err)
	}
	return sub.out, nil
}

func (s *Subscriber) subscribe(ctx context.Context, topic string) (*subscription, error) {
	if s.isClosed() {
		return nil, ErrSubscriberClosed
	}
	if err := checkTopic(topic); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	queue, err := s.client.route(topic)
	if err != nil {
		return nil, err
	}
	group, err := s.group(topic)
	if err != nil {
		return nil, err
	}
	if err := s.client.checkListen(queue); err != nil {
		return nil, err
	}
	if err := queue.ready(ctx, s.client); err != nil {
		return nil, err
	}
	if err := s.readyForWork(ctx); err != nil {
		return nil, err
	}
	dead, err := s.deadLetters(ctx, topic, queue)
	if err != nil {
		return nil, err
	}
	adopts, err := queue.register(ctx, s.client, topic, group, s.log)
	if err != nil {
		return nil, err
	}
	sub := s.newSubscription(ctx, topic, group, queue)
	sub.dead = dead
	sub.adopts = adopts
	if !adopts {
		sub.adopted = time.Now()
	}
	if !s.add(sub) {
		return nil, ErrSubscriberClosed
	}
	// The place in the hub is taken: a notification that comes as soon as the server listens finds it.
	if err := s.client.listen(ctx, sub); err != nil {
		sub.abandon()
		s.remove(sub)
		close(sub.done)
		return nil, err
	}
	unwatch := context.AfterFunc(ctx, sub.stop)
	sub.ended = func() {
		unwatch()
		s.remove(sub)
	}
	go sub.run()
	return sub, nil
}

// readyForWork creates what handlers may publish to in their transactions: no DDL runs there.
func (s *Subscriber) readyForWork(ctx context.Context) error {
	if !s.config.Transactional {
		return nil
	}
	return s.client.readyAll(ctx)
}

func (s *Subscriber) group(topic string) (string, error) {
	if s.config.ConsumerGroupFunc == nil {
		return s.config.ConsumerGroup, nil
	}
	group := s.config.ConsumerGroupFunc(topic)
	return group, checkGroup(group)
}

// SubscribeInitialize creates the default table where it is missing, and that of the dead letters, and registers the consumer group, so that what is
// published before the first Subscribe is kept for it. Subscribe does the same.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	if err := s.initialize(topic); err != nil {
		return fmt.Errorf("initialize %q: %w", topic, err)
	}
	return nil
}

func (s *Subscriber) initialize(topic string) error {
	if s.isClosed() {
		return ErrSubscriberClosed
	}
	if err := checkTopic(topic); err != nil {
		return err
	}
	queue, err := s.client.route(topic)
	if err != nil {
		return err
	}
	group, err := s.group(topic)
	if err != nil {
		return err
	}
	ctx := context.Background()
	if err := queue.ready(ctx, s.client); err != nil {
		return err
	}
	if _, err := s.deadLetters(ctx, topic, queue); err != nil {
		return err
	}
	_, err = queue.register(ctx, s.client, topic, group, s.log)
	return err
}

// Close ends all subscriptions and returns when their channels are closed: after at most CloseTimeout for the messages
// that are with handlers, and a few seconds for the database. Messages that were acknowledged by then are settled and
// never come again; the others are claimable at once, with their attempt given back. What the database does not take in
// that time comes again when its lease ends. Further calls wait for the same end.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	s.closed = true
	subs := make([]*subscription, 0, len(s.subs))
	for sub := range s.subs {
		subs = append(subs, sub)
	}
	s.mu.Unlock()
	for _, sub := range subs {
		sub.stop()
	}
	for _, sub := range subs {
		<-sub.done
	}
	return nil
}

func (s *Subscriber) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// add registers a subscription with its Subscriber and the client, unless the Subscriber was closed meanwhile.
func (s *Subscriber) add(sub *subscription) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.client.add(sub) {
		sub.cancelClaims()
		sub.cancelSettling()
		return false
	}
	s.subs[sub] = struct{}{}
	return true
}

func (s *Subscriber) remove(sub *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.subs, sub)
}

func (s *Subscriber) newSubscription(ctx context.Context, topic, group string, q *queue) *subscription {
	claims, cancel := context.WithCancel(context.Background())
	settling, cancelSettling := context.WithCancel(context.Background())
	config := s.config
	if config.PollInterval == 0 {
		config.PollInterval = s.client.config.PollInterval
	}
	sub := &subscription{
		client: s.client, queue: q, config: config, topic: topic, group: group,
		logger: s.log,
		log:    s.log.With(watermill.LogFields{"topic": topic, "consumer_group": group, "table": q.name}),
		base:   context.WithoutCancel(ctx), out: make(chan *message.Message),
		key: wakeKey{table: q.name, topic: topic}, waker: newWaker(),
		stopping: make(chan struct{}), claims: claims, cancelClaims: cancel, settling: settling, cancelSettling: cancelSettling, done: make(chan struct{}),
		inWork: map[*delivery]time.Time{}, changed: make(chan struct{}, 1), cut: make(chan struct{}),
	}
	sub.claim = sub.claimFrom
	return sub
}

func checkTopic(topic string) error {
	if topic == "" {
		return errors.New("topic is empty")
	}
	if len(topic) > maxTopic {
		return fmt.Errorf("topic has %d bytes, the limit is %d", len(topic), maxTopic)
	}
	return checkText("topic", topic)
}
