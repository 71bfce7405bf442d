package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func summary(t *testing.T, lines ...string) (string, error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "promises")
	require.NoError(t, os.WriteFile(name, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	var out strings.Builder
	err := run(name, &out)
	return out.String(), err
}

func TestPromisesAreSortedByTheirIDs(t *testing.T) {
	t.Parallel()
	out, err := summary(t,
		`{"id":"W15","test":"TestB","result":"pass"}`,
		`{"id":"W2","test":"TestA","result":"pass"}`,
		`{"id":"W2","test":"TestA","result":"pass"}`,
		`{"id":"FS1","test":"TestC","result":"skip"}`,
	)
	require.NoError(t, err)
	require.Equal(t, "FS1   skip  TestC\nW2    pass  TestA\nW15   pass  TestB\npromises: 2 kept, 0 broken\n", out)
}

func TestABrokenPromiseFails(t *testing.T) {
	t.Parallel()
	out, err := summary(t,
		`{"id":"W1","test":"TestA","result":"pass"}`,
		`{"id":"W1","test":"TestB","result":"fail"}`,
	)
	require.EqualError(t, err, "1 broken")
	require.Contains(t, out, "promises: 0 kept, 1 broken\n")
}

func TestAMangledRecordFails(t *testing.T) {
	t.Parallel()
	_, err := summary(t, `{"id":`)
	require.Error(t, err)
}

func TestNoFileIsNoPromise(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, run(filepath.Join(t.TempDir(), "missing"), &out))
	require.Equal(t, "promises: 0 kept, 0 broken\n", out.String())
}
