package marshaler

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestCheckText(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"", "orders.eu", "é€😀\ufffd", "\x01\n\x7f"} {
		require.NoError(t, CheckText(ok))
	}
	require.EqualError(t, CheckText("a\x00"), "has a NUL byte")
	require.EqualError(t, CheckText("a\xc0\x80"), "is not valid UTF-8")
}

func TestMendedTextIsAcceptedAndGoodTextIsLeftAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOf(rapid.Byte()).Draw(t, "text"))
		mended := mendText(s)
		require.NoError(t, CheckText(mended))
		if CheckText(s) == nil {
			require.Equal(t, s, mended)
		}
	})
}
