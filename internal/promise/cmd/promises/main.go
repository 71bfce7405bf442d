// Command promises prints the promises that a test run recorded, sorted by id, with their tests and results. It fails if
// one of them is broken.
//
//	promises FILE
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/pgmill/pgmill/internal/promise"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: promises FILE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "promises:", err)
		os.Exit(1)
	}
}

func run(name string, out io.Writer) error {
	records, err := read(name)
	if err != nil {
		return err
	}
	kept, broken := map[string]bool{}, map[string]bool{}
	for _, r := range records {
		fmt.Fprintf(out, "%-5s %-5s %s\n", r.ID, r.Result, r.Test)
		switch r.Result {
		case promise.Pass:
			kept[r.ID] = true
		case promise.Fail:
			broken[r.ID] = true
		}
	}
	for id := range broken {
		delete(kept, id)
	}
	fmt.Fprintf(out, "promises: %d kept, %d broken\n", len(kept), len(broken))
	if len(broken) > 0 {
		return fmt.Errorf("%d broken", len(broken))
	}
	return nil
}

// read returns the records of the file, each once, in the order of their ids. A file that is not there means that no
// test kept a promise.
func read(name string) ([]promise.Record, error) {
	data, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var records []promise.Record
	for line := range bytes.Lines(data) {
		var r promise.Record
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("read %s: %q: %w", name, line, err)
		}
		records = append(records, r)
	}
	slices.SortFunc(records, compare)
	return slices.Compact(records), nil
}

func compare(a, b promise.Record) int {
	aLetters, aNumber := split(a.ID)
	bLetters, bNumber := split(b.ID)
	return cmp.Or(
		cmp.Compare(aLetters, bLetters),
		cmp.Compare(aNumber, bNumber),
		cmp.Compare(a.Test, b.Test),
		cmp.Compare(a.Result, b.Result),
	)
}

// split parts W15 into W and 15, so that W2 sorts before W15.
func split(id string) (string, int) {
	letters := strings.TrimRight(id, "0123456789")
	number, _ := strconv.Atoi(id[len(letters):])
	return letters, number
}
