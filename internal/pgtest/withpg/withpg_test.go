package withpg_test

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/pgtest/withpg"
)

func TestMain(m *testing.M) {
	if os.Getenv("RUN_WITHPG") != "" {
		os.Exit(withpg.Main(os.Args[1:]))
	}
	pgtest.Main(m)
}

// command runs this test binary as withpg. Without a DSN of its own it starts a server.
func command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "RUN_WITHPG=1", "PGMILL_TEST_DSN=", "PGMILL_TEST_CONTROL=", "SELF="+os.Args[0])
	return cmd
}

func exitCode(t *testing.T, err error) int {
	t.Helper()
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	return exit.ExitCode()
}

// folder is the server's, where the control socket lies.
const folder = `dirname "$PGMILL_TEST_CONTROL"; `

func TestCommandGetsAServerThatEndsWithIt(t *testing.T) {
	t.Parallel()
	out, err := command("--", "sh", "-c", folder+`echo "$PGMILL_TEST_DSN"; exit 7`).CombinedOutput()
	require.Equal(t, 7, exitCode(t, err), string(out))
	lines := strings.Fields(string(out))
	require.Len(t, lines, 2)
	require.NoDirExists(t, lines[0])
	require.Contains(t, lines[1], "postgres://")
}

func TestRestartCommand(t *testing.T) {
	t.Parallel()
	out, err := command("sh", "-c", `
		pid() { head -n 1 "$(dirname "$PGMILL_TEST_CONTROL")/data/postmaster.pid"; }
		before=$(pid)
		"$SELF" restart immediate && "$SELF" restart || exit 1
		[ "$before" != "$(pid)" ]`).CombinedOutput()
	require.Zero(t, exitCode(t, err), string(out))
}

func TestRestartCommandSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	out, err := command("restart").CombinedOutput()
	require.Equal(t, 1, exitCode(t, err))
	require.Contains(t, string(out), "no control socket")
	out, err = command("restart", "sideways").CombinedOutput()
	require.Equal(t, 1, exitCode(t, err))
	require.Contains(t, string(out), "want smart, fast or immediate")
}

func TestServerOfTheEnvironmentIsUsed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	cmd := command("sh", "-c", `echo "$PGMILL_TEST_DSN"`)
	cmd.Env = append(cmd.Env, "PGMILL_TEST_DSN="+db.DSN)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err)
	require.Equal(t, db.DSN, strings.TrimSpace(string(out)))
}

func TestSignalsReachTheCommand(t *testing.T) {
	t.Parallel()
	cmd := command("sh", "-c", folder+`trap 'exit 5' TERM; while :; do sleep 0.05; done`)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(stdout)
	require.True(t, lines.Scan())
	dir := lines.Text()
	// The shell may not have set its trap yet: then the signal ends it, which is also fine to forward.
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Contains(t, []int{5, 128 + int(syscall.SIGTERM)}, exitCode(t, cmd.Wait()))
	require.NoDirExists(t, dir)
}

func TestServerIsGoneAfterWithpgWasKilled(t *testing.T) {
	t.Parallel()
	cmd := command("sh", "-c", folder+`echo ready; exec sleep 5`)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(stdout)
	require.True(t, lines.Scan())
	dir := lines.Text()
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool {
		_, err := os.Stat(dir)
		return os.IsNotExist(err)
	}, 10*time.Second, 20*time.Millisecond)
}

func TestWithoutServerTheErrorSaysWhatToInstall(t *testing.T) {
	t.Parallel()
	cmd := command("true")
	cmd.Env = append(cmd.Env, "PGMILL_TEST_BIN=/nowhere/bin")
	out, err := cmd.CombinedOutput()
	require.Equal(t, 127, exitCode(t, err))
	require.Contains(t, string(out), "apt-get install postgresql")
}

func TestInstallNeedsPermission(t *testing.T) {
	t.Parallel()
	cmd := command("-install", "true")
	cmd.Env = append(cmd.Env, "PGMILL_TEST_BIN=/nowhere/bin", "PATH=/nowhere/bin")
	out, err := cmd.CombinedOutput()
	require.Equal(t, 127, exitCode(t, err))
	require.Contains(t, string(out), "no apt-get here")
	require.Contains(t, string(out), "PGMILL_TEST_DSN: not set")
}

func TestInstallRunsAptGet(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("would ask for sudo")
	}
	bin := t.TempDir()
	fake := "#!/bin/sh\necho \"apt-get $*\"\n"
	require.NoError(t, os.WriteFile(bin+"/apt-get", []byte(fake), 0o755))
	cmd := command("-install", "true")
	cmd.Env = append(cmd.Env, "PGMILL_TEST_BIN=/nowhere/bin", "PATH="+bin+":/bin:/usr/bin")
	out, err := cmd.CombinedOutput()
	require.Equal(t, 127, exitCode(t, err), "and there is still no server")
	require.Contains(t, string(out), "withpg: no PostgreSQL found, running: apt-get update")
	require.Contains(t, string(out), "apt-get install -y --no-install-recommends postgresql")
}

func TestUsage(t *testing.T) {
	t.Parallel()
	out, err := command().CombinedOutput()
	require.Equal(t, 2, exitCode(t, err))
	require.Contains(t, string(out), "usage: withpg")
}
