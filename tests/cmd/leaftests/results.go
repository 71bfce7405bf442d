package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
)

// results is how each leaf test ended, by mode and leaf test: pass, skip, fail, or run if it never ended.
type results map[string]map[string]string

// worse orders the ways a leaf test can end. One that several event files hold counts with its worst, but a skip gives
// way to a pass: a run that leaves a test out may be completed by another.
var worse = []string{"skip", "pass", "run", "fail"}

// read adds the leaf tests among the events of the folder's package: the suite runs each as TestMode/TestLeaf/<uuid>.
func (r results) read(events io.Reader, folder string) error {
	lines := bufio.NewReader(events)
	last := map[string]string{} // by the test's full name
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var event struct{ Action, Package, Test string }
			if err := json.Unmarshal(line, &event); err != nil {
				return fmt.Errorf("event %q: %w", line, err)
			}
			if path.Base(event.Package) == folder && slices.Contains(worse, event.Action) {
				last[event.Test] = event.Action
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	for test, result := range last {
		names := strings.Split(test, "/")
		if len(names) == 3 && strings.HasPrefix(names[1], "Test") {
			r.merge(names[0], names[1], result)
		}
	}
	return nil
}

func (r results) merge(mode, leaf, result string) {
	if r[mode] == nil {
		r[mode] = map[string]string{}
	}
	if old, ok := r[mode][leaf]; !ok || slices.Index(worse, result) > slices.Index(worse, old) {
		r[mode][leaf] = result
	}
}

// compare says what in got is not as want has it.
func compare(want table, got results) []error {
	var errs []error
	for _, m := range want {
		known := map[string]bool{}
		for _, l := range m.leaves {
			known[l.name] = true
			if err := l.check(got[m.name][l.name]); err != nil {
				errs = append(errs, fmt.Errorf("%s/%s: %w", m.name, l.name, err))
			}
		}
		for _, name := range slices.Sorted(maps.Keys(got[m.name])) {
			if !known[name] {
				errs = append(errs, fmt.Errorf("%s/%s: ran, but the table has no such leaf test", m.name, name))
			}
		}
	}
	return errs
}

func (l leaf) check(result string) error {
	switch {
	case result == "fail":
		return fmt.Errorf("failed")
	case result == "run":
		return fmt.Errorf("started, but did not end")
	case l.runs && result == "":
		return fmt.Errorf("missing: the table says that it passes")
	case l.runs && result == "skip":
		return fmt.Errorf("skipped: the table says that it passes")
	case !l.runs && result == "pass":
		return fmt.Errorf("passed: the table says that it is skipped")
	}
	return nil
}
