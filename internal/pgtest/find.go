package pgtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
)

// oldestMajor is the oldest PostgreSQL the library supports.
const oldestMajor = 14

// binPatterns are the places where distributions and package managers put server binaries.
var binPatterns = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/libexec/postgresql*",
	"/usr/local/pgsql/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/opt/local/lib/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// binaries is a directory that holds postgres and initdb of one version.
type binaries struct {
	dir          string
	major, minor int
}

// findBinaries returns the newest server binaries of this machine. Where there are none, the error
// says where it looked.
func findBinaries(ctx context.Context) (binaries, error) {
	var found []binaries
	tried := binDirs(ctx)
	for _, dir := range tried {
		if b, ok := inspect(ctx, dir); ok {
			found = append(found, b)
		}
	}
	if len(found) == 0 {
		return binaries{}, fmt.Errorf("no postgres and initdb of version %d or later in %s",
			oldestMajor, placesTried(tried))
	}
	sort.SliceStable(found, func(i, j int) bool {
		a, b := found[i], found[j]
		if a.major != b.major {
			return a.major > b.major
		}
		return a.minor > b.minor
	})
	return found[0], nil
}

// binDirs lists the directories to inspect. $PGMILL_TEST_BIN, when set, is the whole list, so that a
// version can be chosen.
func binDirs(ctx context.Context) []string {
	if list := os.Getenv("PGMILL_TEST_BIN"); list != "" {
		return filepath.SplitList(list)
	}
	var dirs []string
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range binPatterns {
		matches, _ := filepath.Glob(pattern)
		dirs = append(dirs, matches...)
	}
	// PATH last and through symlinks: initdb looks for its siblings where it really lies.
	if path, err := exec.LookPath("postgres"); err == nil {
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	return dirs
}

func placesTried(dirs []string) string {
	if os.Getenv("PGMILL_TEST_BIN") != "" {
		return "$PGMILL_TEST_BIN (" + strings.Join(dirs, ", ") + ")"
	}
	return "$PGMILL_TEST_BIN (not set), pg_config --bindir, " + strings.Join(binPatterns, ", ") + ", $PATH"
}

var versionPattern = regexp.MustCompile(`\(PostgreSQL\) (\d+)(?:\.(\d+))?`)

func inspect(ctx context.Context, dir string) (binaries, bool) {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return binaries{}, false
	}
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return binaries{}, false
	}
	m := versionPattern.FindStringSubmatch(string(out))
	if m == nil {
		return binaries{}, false
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return binaries{dir: dir, major: major, minor: minor}, major >= oldestMajor
}
