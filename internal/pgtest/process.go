package pgtest

import (
	"os/exec"
	"runtime"
	"syscall"
)

// process is a child that does not outlive this process.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the child has been waited for
	err  error         // what Wait returned; to be read after done
}

// startTied starts cmd in a process group of its own, so that Ctrl-C does not reach it before us, and
// has the kernel send it sig when this process dies, where the kernel can.
//
// The kernel sends that signal when the thread that forked dies, not the process. So one goroutine
// starts the child, waits for it, and keeps its thread until then.
func startTied(cmd *exec.Cmd, sig syscall.Signal) (*process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if !protectionOff("deathsig") {
		setDeathSignal(cmd.SysProcAttr, sig)
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, <-started
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) exited() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}
