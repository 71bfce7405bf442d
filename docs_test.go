package pgmill

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// Every promise of docs/guarantees.md names the tests that keep it.
func TestEveryTestThatTheGuaranteesNameExists(t *testing.T) {
	t.Parallel()
	tests := definedTests(t)
	text, err := os.ReadFile("docs/guarantees.md")
	require.NoError(t, err)
	named := regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(text), -1)
	require.NotEmpty(t, named)
	for _, name := range named {
		if name == "TestNewSubscriberReceivesOldMessages" { // Watermill's, which does not apply
			continue
		}
		require.True(t, tests[name], "%s is no test", name)
	}
}

// Whoever turns Notify on should know what the server does for it.
func TestReadmeLinksToTheServersMechanism(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W42", "W45")
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	require.Contains(t, string(text), "https://www.postgresql.org/docs/current/sql-notify.html")
	require.Contains(t, string(text), "https://www.postgresql.org/message-id/")
	require.Contains(t, string(text), "282b1cde9d")
}

// definedTests are the names of all test functions of the repository.
func definedTests(t *testing.T) map[string]bool {
	t.Helper()
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	tests := map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !regexp.MustCompile(`_test\.go$`).MatchString(path) {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range function.FindAllSubmatch(text, -1) {
			tests[string(match[1])] = true
		}
		return err
	}))
	return tests
}
