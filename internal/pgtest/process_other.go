//go:build !linux

package pgtest

import "syscall"

// setDeathSignal does nothing: only Linux can tie a child to its parent. The watchdog stands alone.
func setDeathSignal(*syscall.SysProcAttr, syscall.Signal) {}
