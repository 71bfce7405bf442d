package main

import (
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// order is what the messages carry.
type order struct {
	ID      int    `json:"id"`
	Items   int    `json:"items"`
	Cents   int    `json:"cents,omitempty"`
	Trouble string `json:"trouble,omitempty"`
}

// The trouble an order makes.
const (
	failsTwice  = "fails twice"
	failsAlways = "fails always"
)

func newOrder(id int) order {
	o := order{ID: id, Items: 1 + id%5}
	switch id {
	case 1:
		o.Trouble = failsTwice
	case 2:
		o.Trouble = failsAlways
	}
	return o
}

func (o order) message() (*message.Message, error) {
	payload, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	return message.NewMessage(watermill.NewUUID(), payload), nil
}

// messages is what a handler returns that passes the order on.
func (o order) messages() ([]*message.Message, error) {
	msg, err := o.message()
	if err != nil {
		return nil, err
	}
	return message.Messages{msg}, nil
}

func decodeOrder(msg *message.Message) (order, error) {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return o, fmt.Errorf("decode order: %w", err)
	}
	return o, nil
}
