package promise_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// fakeT stands in for a test whose end the test under way decides.
type fakeT struct {
	testing.TB
	failed, skipped bool
	errors          []string
	cleanups        []func()
}

func (f *fakeT) Helper()          {}
func (f *fakeT) Name() string     { return "TestOther" }
func (f *fakeT) Failed() bool     { return f.failed }
func (f *fakeT) Skipped() bool    { return f.skipped }
func (f *fakeT) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }
func (f *fakeT) Errorf(format string, args ...any) {
	f.failed = true
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func (f *fakeT) end() {
	for _, c := range f.cleanups {
		c()
	}
}

func TestKeepRecordsHowTheTestEnded(t *testing.T) {
	name := filepath.Join(t.TempDir(), "promises")
	t.Setenv(promise.FileEnv, name)
	var passed, failed, skipped fakeT
	promise.Keep(&passed, "W1", "FS12")
	promise.Keep(&failed, "P20")
	promise.Keep(&skipped, "O5")
	failed.failed, skipped.skipped = true, true
	require.NoFileExists(t, name, "recorded before the test ended")
	passed.end()
	failed.end()
	skipped.end()

	got, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, `{"id":"W1","test":"TestOther","result":"pass"}
{"id":"FS12","test":"TestOther","result":"pass"}
{"id":"P20","test":"TestOther","result":"fail"}
{"id":"O5","test":"TestOther","result":"skip"}
`, string(got))
}

func TestKeepRefusesAnIDOfAnotherForm(t *testing.T) {
	t.Setenv(promise.FileEnv, "")
	for _, id := range []string{"", "W", "w1", "W01", "W1a", "W-1", "ABC1", "W1 "} {
		var f fakeT
		promise.Keep(&f, id)
		require.Len(t, f.errors, 1, "id %q", id)
	}
}

func TestKeepWithoutAFileRecordsNothing(t *testing.T) {
	t.Setenv(promise.FileEnv, "")
	var f fakeT
	promise.Keep(&f, "W1")
	require.Empty(t, f.cleanups)
}

func TestKeepFailsTheTestWhenItCannotRecord(t *testing.T) {
	t.Setenv(promise.FileEnv, filepath.Join(t.TempDir(), "missing", "promises"))
	var f fakeT
	promise.Keep(&f, "W1")
	f.end()
	require.Len(t, f.errors, 1)
}
