// Package promise records which of the project's stated promises a test run has checked, and how each check ended.
package promise

import (
	"encoding/json"
	"os"
	"regexp"
	"testing"
)

// FileEnv names the environment variable with the file that Keep appends to. Unset, nothing is recorded. The path is
// absolute, since each package's tests run in a folder of their own.
const FileEnv = "PGMILL_PROMISES"

// Record is one line of the file: the promise, the test that checks it, and how that test ended.
type Record struct {
	ID     string `json:"id"`
	Test   string `json:"test"`
	Result string `json:"result"`
}

// The results of a Record. Only Pass means that the promise was checked and holds.
const (
	Pass = "pass"
	Fail = "fail"
	Skip = "skip"
)

var validID = regexp.MustCompile(`^[A-Z]{1,2}[1-9][0-9]*$`)

// Keep says that t checks the promises with these ids (W15, FS1) and records its result when t has ended. Call it
// first in the test, so that failures of t's other cleanups count. An id of another form fails t.
func Keep(t testing.TB, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if !validID.MatchString(id) {
			t.Errorf("promise %q: not one or two capital letters and a number", id)
		}
	}
	name := os.Getenv(FileEnv)
	if name == "" {
		return
	}
	t.Cleanup(func() {
		for _, id := range ids {
			if err := appendRecord(name, Record{ID: id, Test: t.Name(), Result: result(t)}); err != nil {
				t.Errorf("record promise %s: %v", id, err)
			}
		}
	})
}

func result(t testing.TB) string {
	switch {
	case t.Failed():
		return Fail
	case t.Skipped():
		return Skip
	}
	return Pass
}

// appendRecord makes one write per line: with O_APPEND the lines of packages that run at the same time never mix.
func appendRecord(name string, r Record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
