package conformance

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// TestReconnect of Watermill v1.5.1 compares what has arrived with what it has noted as published as soon as the last message
// arrives. It notes a message a moment after Publish has returned, and a message that is delivered within that moment fails it.
// So that test, and no other, gets its messages this much later.
const noticeTime = 100 * time.Millisecond

// notice knows when messages were published.
type notice struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (n *notice) note(msgs []*message.Message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, msg := range msgs {
		n.at[msg.UUID] = time.Now()
	}
}

// wait until a message's Publish has returned, and noticeTime longer.
func (n *notice) wait(ctx context.Context, uuid string) {
	for ctx.Err() == nil {
		n.mu.Lock()
		at, ok := n.at[uuid]
		n.mu.Unlock()
		if ok && time.Since(at) >= noticeTime {
			return
		}
		time.Sleep(noticeTime / 20)
	}
}

type noticedPublisher struct {
	message.Publisher
	notice *notice
}

func (p noticedPublisher) Publish(topic string, msgs ...*message.Message) error {
	defer p.notice.note(msgs) // also after an error: the messages may be stored
	return p.Publisher.Publish(topic, msgs...)
}

type noticedSubscriber struct {
	message.Subscriber
	notice *notice
}

func (s noticedSubscriber) SubscribeInitialize(topic string) error {
	return s.Subscriber.(message.SubscribeInitializer).SubscribeInitialize(topic)
}

func (s noticedSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for msg := range in {
			s.notice.wait(msg.Context(), msg.UUID)
			select {
			case out <- msg:
			case <-msg.Context().Done():
			}
		}
	}()
	return out, nil
}
