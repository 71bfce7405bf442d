// Package groups tests consumer groups from outside: registrations that race with publishers, and groups whose members are
// in several processes, plain ones and those of Watermill's CQRS component.
package groups

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

const limit = 20 * time.Second

func TestMain(m *testing.M) {
	pgtest.RegisterChild("consumer", consumerChild)
	pgtest.Main(m)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, limit, 10*time.Millisecond, what)
}
