package pgmill

import (
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.RegisterChild("rowlock", rowLockChild)
	pgtest.Main(m)
}
