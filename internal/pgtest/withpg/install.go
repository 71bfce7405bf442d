package withpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// installPostgres installs the server's package where apt-get is there and may be used without
// asking anybody for a password. It says what it does.
func installPostgres(ctx context.Context) error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("install postgresql: no apt-get here")
	}
	var prefix []string
	if os.Geteuid() != 0 {
		if err := exec.CommandContext(ctx, "sudo", "-n", "true").Run(); err != nil {
			return errors.New("install postgresql: neither root nor passwordless sudo")
		}
		prefix = []string{"sudo", "-n"}
	}
	steps := [][]string{
		{"apt-get", "update"},
		{"apt-get", "install", "-y", "--no-install-recommends", "postgresql"},
	}
	for _, step := range steps {
		if err := runStep(ctx, append(prefix, step...)); err != nil {
			return err
		}
	}
	return nil
}

func runStep(ctx context.Context, step []string) error {
	line := strings.Join(step, " ")
	fmt.Fprintf(os.Stderr, "withpg: no PostgreSQL found, running: %s\n", line)
	cmd := exec.CommandContext(ctx, step[0], step[1:]...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("install postgresql: %s: %w", line, err)
	}
	return nil
}
