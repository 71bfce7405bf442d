package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const committed = `Some words.

| leaf test | ` + "`TestA`" + ` | TestB |
|---|:-:|---|
| TestOne | pass | pass |
| TestTwo | skip | pass |

| another | table |
`

// events writes one event file. Each outcome reads "TestA/TestOne pass".
func events(t *testing.T, outcomes ...string) string {
	t.Helper()
	var text strings.Builder
	for i, outcome := range outcomes {
		test, action, _ := strings.Cut(outcome, " ")
		fmt.Fprintf(&text, `{"Action":"run","Package":"example.org/conformance","Test":"%s/%d"}`+"\n", test, i)
		if action != "run" {
			fmt.Fprintf(&text, `{"Action":"output","Package":"example.org/conformance","Test":"%s/%d","Output":"x\n"}`+"\n", test, i)
			fmt.Fprintf(&text, `{"Action":%q,"Package":"example.org/conformance","Test":"%s/%d","Elapsed":0.1}`+"\n", action, test, i)
		}
	}
	text.WriteString(`{"Action":"pass","Package":"example.org/conformance","Test":"TestA/TestOne"}` + "\n")
	text.WriteString(`{"Action":"pass","Package":"example.org/conformance","Test":"TestOther/case/TestDeep"}` + "\n")
	text.WriteString(`{"Action":"pass","Package":"example.org/other","Test":"TestA/TestThree/0b5e"}` + "\n")
	text.WriteString(`{"Action":"pass","Package":"example.org/conformance"}` + "\n")
	return write(t, text.String())
}

func write(t *testing.T, text string) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "conformance")
	require.NoError(t, os.Mkdir(folder, 0o700))
	name := filepath.Join(folder, "file")
	require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

func TestRun(t *testing.T) {
	t.Parallel()
	good := []string{"TestA/TestOne pass", "TestA/TestTwo skip", "TestB/TestOne pass", "TestB/TestTwo pass"}
	with := func(i int, outcome string) []string {
		changed := append([]string{}, good...)
		changed[i] = outcome
		return changed
	}
	for name, c := range map[string]struct {
		outcomes []string
		err      string
	}{
		"as the table says": {good, ""},
		"left out":          {good[:3], "TestB/TestTwo: missing: the table says that it passes"},
		"skip left out":     {with(1, "TestX/case pass"), ""},
		"skipped":           {with(3, "TestB/TestTwo skip"), "TestB/TestTwo: skipped: the table says that it passes"},
		"extra":             {with(1, "TestA/TestTwo pass"), "TestA/TestTwo: passed: the table says that it is skipped"},
		"unknown leaf":      {append(good, "TestB/TestThree pass"), "TestB/TestThree: ran, but the table has no such leaf test"},
		"unknown skip":      {append(good, "TestB/TestThree skip"), "TestB/TestThree: ran, but the table has no such leaf test"},
		"unknown mode":      {append(good, "TestC/TestOne pass"), "TestC: ran, but the table has no such mode"},
		"failed":            {with(0, "TestA/TestOne fail"), "TestA/TestOne: failed"},
		"failed once":       {append(with(0, "TestA/TestOne fail"), good[0]), "TestA/TestOne: failed"},
		"never ended":       {with(0, "TestA/TestOne run"), "TestA/TestOne: started, but did not end"},
		"nothing ran": {
			nil, "TestA/TestOne: missing: the table says that it passes\n" +
				"TestB/TestOne: missing: the table says that it passes\nTestB/TestTwo: missing: the table says that it passes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			err := run(&out, write(t, committed), nil, []string{events(t, c.outcomes...)})
			if c.err != "" {
				require.EqualError(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, "TestA: 1 of 2 leaf tests ran and passed, as the table says\n"+
				"TestB: 2 of 2 leaf tests ran and passed, as the table says\n", out.String())
		})
	}
}

func TestSeveralFilesAreOneRun(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	first := events(t, "TestB/TestOne pass", "TestB/TestTwo skip")
	require.NoError(t, run(&out, write(t, committed), []string{"TestB"}, []string{first, events(t, "TestB/TestTwo pass")}))
	require.Equal(t, "TestB: 2 of 2 leaf tests ran and passed, as the table says\n", out.String())

	err := run(&out, write(t, committed), []string{"TestB"}, []string{
		events(t, "TestB/TestOne fail", "TestB/TestTwo pass"), events(t, "TestB/TestOne pass"),
	})
	require.EqualError(t, err, "TestB/TestOne: failed")
}

func TestAModeThatTheTableLacks(t *testing.T) {
	t.Parallel()
	err := run(&strings.Builder{}, write(t, committed), []string{"TestC"}, []string{events(t)})
	require.ErrorContains(t, err, "no mode TestC")
}

func TestMistakesInTheFiles(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ table, events, err string }{
		"no table":     {"words\n", "", "no table of modes"},
		"short row":    {"| l | TestA |\n|---|---|\n| TestOne |\n", "", "row TestOne: 0 cells for 1 modes"},
		"other word":   {"| l | TestA |\n|---|---|\n| TestOne | yes |\n", "", `row TestOne: "yes" is neither pass nor skip`},
		"not an event": {committed, "FAIL\n", `event "FAIL\n"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := run(&strings.Builder{}, write(t, c.table), nil, []string{write(t, c.events)})
			require.ErrorContains(t, err, c.err)
		})
	}
}
