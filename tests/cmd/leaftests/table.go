package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// mode is one column of the table: the top-level test of a mode and what each leaf test must do in it.
type mode struct {
	name   string
	leaves []leaf
}

type leaf struct {
	name string
	runs bool
}

type table []mode

func (m mode) passing() int {
	n := 0
	for _, l := range m.leaves {
		if l.runs {
			n++
		}
	}
	return n
}

// only keeps the named modes; no names keep all.
func (t table) only(names []string) (table, error) {
	if len(names) == 0 {
		return t, nil
	}
	var kept table
	for _, name := range names {
		i := slices.IndexFunc(t, func(m mode) bool { return m.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no mode %s", name)
		}
		kept = append(kept, t[i])
	}
	return kept, nil
}

// unknown says which modes in got the table lacks.
func (t table) unknown(got results) []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if !slices.ContainsFunc(t, func(m mode) bool { return m.name == name }) {
			errs = append(errs, fmt.Errorf("%s: ran, but the table has no such mode", name))
		}
	}
	return errs
}

// parseTable reads the first Markdown table of text: modes across, leaf tests down, "pass" or "skip" where they meet.
func parseTable(text string) (table, error) {
	var t table
	for line := range strings.Lines(text) {
		cells := cells(line)
		switch {
		case cells == nil:
			if t != nil {
				return t, nil
			}
		case t == nil:
			for _, name := range cells[1:] {
				t = append(t, mode{name: name})
			}
		case strings.Trim(cells[0], ":-") == "":
		default:
			if err := t.addRow(cells); err != nil {
				return nil, err
			}
		}
	}
	if t == nil {
		return nil, errors.New("no table of modes")
	}
	return t, nil
}

func (t table) addRow(cells []string) error {
	if len(cells) != len(t)+1 {
		return fmt.Errorf("row %s: %d cells for %d modes", cells[0], len(cells)-1, len(t))
	}
	for i, cell := range cells[1:] {
		if cell != "pass" && cell != "skip" {
			return fmt.Errorf("row %s: %q is neither pass nor skip", cells[0], cell)
		}
		t[i].leaves = append(t[i].leaves, leaf{name: cells[0], runs: cell == "pass"})
	}
	return nil
}

// cells splits a table's line; any other line gives nil.
func cells(line string) []string {
	line, ok := strings.CutPrefix(strings.TrimSpace(line), "|")
	if !ok {
		return nil
	}
	parts := strings.Split(strings.TrimSuffix(line, "|"), "|")
	for i := range parts {
		parts[i] = strings.Trim(parts[i], " `")
	}
	return parts
}
