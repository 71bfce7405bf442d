package pgmill_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	module    = "github.com/pgmill/pgmill"
	watermill = "github.com/ThreeDotsLabs/watermill"
	pgx       = "github.com/jackc/pgx/v5"
)

// imports is what the files of one folder import from outside the standard library.
type imports struct {
	folder string // slash-separated, from the module's root
	code   []string
	tests  []string
}

// TestImportsPointDown keeps the layout of docs/design.md: tests, examples -> root -> claimshape, marshaler -> pgx,
// watermill. It reads the sources, so that it also sees files that this platform does not build.
func TestImportsPointDown(t *testing.T) {
	t.Parallel()
	core := []string{pgx, pgx + "/pgconn", pgx + "/pgproto3", pgx + "/pgtype"}
	library := []string{watermill + "/...", pgx + "/..."}
	allowed := map[string][]string{
		".":          append(library, module+"/claimshape", module+"/marshaler"),
		"claimshape": append(core, module+"/claimshape/..."),
		"marshaler":  append(core, module+"/marshaler/...", watermill+"/message"),
	}
	outer := []string{module + "/tests/...", module + "/examples/..."}
	harness := []string{module + "/internal/pgtest/...", module + "/internal/promise/..."}

	checked := map[string]bool{}
	for _, i := range readImports(t) {
		top, _, _ := strings.Cut(i.folder, "/")
		checked[top] = true
		if rule, ok := allowed[top]; ok {
			i.require(t, i.code, func(imported string) bool { return within(imported, rule) })
		}
		if top == "examples" {
			continue
		}
		i.require(t, append(i.code, i.tests...), func(imported string) bool { return !within(imported, outer) })
		if top == "internal" {
			continue
		}
		i.require(t, i.code, func(imported string) bool {
			return !within(imported, harness) && within(imported, append(library, module+"/..."))
		})
	}
	for top := range allowed {
		require.True(t, checked[top], "no Go file in %s: its rule checks nothing", top)
	}
}

func (i *imports) require(t *testing.T, imported []string, allowed func(string) bool) {
	t.Helper()
	for _, p := range imported {
		if !allowed(p) {
			t.Errorf("%s must not import %s", i.folder, p)
		}
	}
}

// within tells whether the import path is one of the patterns, or at or below one that ends in /...
func within(imported string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		above, below := strings.CutSuffix(p, "/...")
		return imported == above || below && strings.HasPrefix(imported, above+"/")
	})
}

// readImports reads every Go file of the root module.
func readImports(t *testing.T) []*imports {
	t.Helper()
	folders := map[string]*imports{}
	require.NoError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return skipFolder(name)
		}
		if filepath.Ext(name) != ".go" {
			return nil
		}
		folder := filepath.ToSlash(filepath.Dir(name))
		if folders[folder] == nil {
			folders[folder] = &imports{folder: folder}
		}
		return folders[folder].add(name)
	}))
	var all []*imports
	for _, i := range folders {
		all = append(all, i)
	}
	slices.SortFunc(all, func(a, b *imports) int { return strings.Compare(a.folder, b.folder) })
	return all
}

// skipFolder leaves out other modules and what the go command leaves out.
func skipFolder(name string) error {
	base := filepath.Base(name)
	if name == "." {
		return nil
	}
	if base == "testdata" || base[0] == '.' || base[0] == '_' {
		return fs.SkipDir
	}
	if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

func (i *imports) add(name string) error {
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
	if err != nil {
		return err
	}
	list := &i.code
	if strings.HasSuffix(name, "_test.go") {
		list = &i.tests
	}
	for _, spec := range file.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		if first, _, _ := strings.Cut(imported, "/"); strings.Contains(first, ".") && !slices.Contains(*list, imported) {
			*list = append(*list, imported)
		}
	}
	return nil
}
