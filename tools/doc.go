// Package tools pins, as tools of its own module, what the make targets run, so that users of the library do not get it
// into their go.mod. The scripts beside it are the steps of those targets.
package tools
