package pgmill

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/marshaler"
)

// Route says where the messages of some topics are.
type Route struct {
	// Table that holds them. Defaults to the Config's.
	Table claimshape.Table

	// Marshaler of the route. Defaults to the Config's.
	Marshaler marshaler.Marshaler
}

// routes finds the queue of a topic. Exact names win, then the longest prefix.
type routes struct {
	exact    map[string]*queue
	prefixes []prefixRoute // longest first
	rest     *queue        // of "*", or of all topics where there are no routes
}

type prefixRoute struct {
	prefix string
	queue  *queue
}

func newRoutes(c *Config, l claimshape.Link) *routes {
	if c.Routes == nil {
		return &routes{rest: newQueue(c.Table, l, c.Marshaler)}
	}
	r := &routes{exact: map[string]*queue{}}
	for pattern, route := range c.Routes {
		q := newQueue(route.Table, l, route.Marshaler)
		switch prefix, wild := strings.CutSuffix(pattern, "*"); {
		case pattern == "*":
			r.rest = q
		case wild:
			r.prefixes = append(r.prefixes, prefixRoute{prefix: prefix, queue: q})
		default:
			r.exact[pattern] = q
		}
	}
	slices.SortFunc(r.prefixes, func(a, b prefixRoute) int { return len(b.prefix) - len(a.prefix) })
	return r
}

func (r *routes) find(topic string) (*queue, error) {
	if q := r.exact[topic]; q != nil {
		return q, nil
	}
	for _, p := range r.prefixes {
		if strings.HasPrefix(topic, p.prefix) {
			return p.queue, nil
		}
	}
	if r.rest == nil {
		return nil, ErrNoRoute
	}
	return r.rest, nil
}

// all queues, each once.
func (r *routes) all() []*queue {
	all := slices.Collect(maps.Values(r.exact))
	for _, p := range r.prefixes {
		all = append(all, p.queue)
	}
	if r.rest != nil {
		all = append(all, r.rest)
	}
	return all
}

// setDefaults fills in the routes, in a map of our own.
func (c *Config) setRouteDefaults() {
	c.Routes = maps.Clone(c.Routes)
	for pattern, route := range c.Routes {
		if route.Table == (claimshape.Table{}) {
			route.Table = c.Table
		}
		route.Table = route.Table.WithDefaults()
		if route.Marshaler == nil {
			route.Marshaler = c.Marshaler
		}
		c.Routes[pattern] = route
	}
}

func (c *Config) checkRoutes() error {
	var problems []error
	for _, pattern := range slices.Sorted(maps.Keys(c.Routes)) {
		if err := checkPattern(pattern); err != nil {
			problems = append(problems, fmt.Errorf("Config.Routes[%q]: %w", pattern, err))
		}
		if err := c.Routes[pattern].Table.Check(); err != nil {
			problems = append(problems, fmt.Errorf("Config.Routes[%q]: %w", pattern, err))
		}
	}
	return errors.Join(append(problems, c.checkSameTables())...)
}

// checkSameTables refuses two descriptions of one table that differ: all who claim from it use one shape and one lease.
func (c *Config) checkSameTables() error {
	first := map[string]claimshape.Table{c.Table.String(): c.Table}
	for _, pattern := range slices.Sorted(maps.Keys(c.Routes)) {
		t := c.Routes[pattern].Table
		if was, ok := first[t.String()]; ok && was != t {
			return fmt.Errorf("Config.Routes[%q]: table %s is described in two ways: %+v and %+v", pattern, t, was, t)
		}
		first[t.String()] = t
	}
	return nil
}

func checkPattern(pattern string) error {
	switch {
	case pattern == "":
		return errors.New("empty; every topic is \"*\"")
	case strings.Contains(strings.TrimSuffix(pattern, "*"), "*"):
		return errors.New("a * is only allowed at the end")
	case strings.HasSuffix(pattern, "*") && pattern != "*" && !strings.HasSuffix(pattern, ".*"):
		return errors.New("a prefix ends with .*")
	}
	return nil
}
