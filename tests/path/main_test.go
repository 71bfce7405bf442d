// Package path tests what publishers are told while servers and connections die under them.
package path

import (
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
