// Command leaftests checks which leaf tests of Watermill's universal suite have run, against the committed table.
//
//	leaftests -table leaf_tests.md [-mode TestLease] EVENTS...
//
// EVENTS are files of `go test -json`; several are read as one run, and only the package in the table's own folder counts.
// Each of the table's modes, or only those named with -mode, must have passed the leaf tests that the table says pass and
// no others: a leaf test that is missing, skipped, failed or not in the table is an error, and so is a mode that is not in
// it, so that a feature flag or a suite update cannot drop a test unseen.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	table := flag.String("table", "", "the committed table")
	var modes []string
	flag.Func("mode", "check only this mode of the table (repeatable)", func(mode string) error {
		modes = append(modes, mode)
		return nil
	})
	flag.Parse()
	if *table == "" || flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(os.Stdout, *table, modes, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "leaftests:", strings.ReplaceAll(err.Error(), "\n", "\nleaftests: "))
		os.Exit(1)
	}
}

func run(out io.Writer, tableFile string, modes, eventFiles []string) error {
	text, err := os.ReadFile(tableFile)
	if err != nil {
		return err
	}
	want, err := parseTable(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", tableFile, err)
	}
	folder, err := filepath.Abs(filepath.Dir(tableFile))
	if err != nil {
		return err
	}
	got := results{}
	for _, name := range eventFiles {
		if err := addEvents(got, filepath.Base(folder), name); err != nil {
			return err
		}
	}
	errs := want.unknown(got)
	if want, err = want.only(modes); err != nil {
		return fmt.Errorf("%s: %w", tableFile, err)
	}
	if err := errors.Join(append(errs, compare(want, got)...)...); err != nil {
		return err
	}
	for _, m := range want {
		fmt.Fprintf(out, "%s: %d of %d leaf tests ran and passed, as the table says\n", m.name, m.passing(), len(m.leaves))
	}
	return nil
}

func addEvents(got results, folder, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := got.read(f, folder); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}
