package claimshape

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckFindsWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, Check(t.Context(), b.conn, Default(), b.insert, b.lease))
	for ddl, says := range map[string][]string{
		"DROP TABLE pgmill_messages":                                                                              {"prepare insert", "does not exist"},
		"ALTER TABLE pgmill_messages DROP COLUMN metadata":                                                        {"prepare insert", "metadata"},
		"ALTER TABLE pgmill_messages DROP COLUMN locked_until":                                                    {"prepare claim", "locked_until"},
		"ALTER TABLE pgmill_messages ALTER COLUMN payload DROP DEFAULT, ALTER COLUMN payload TYPE text USING 'x'": {"prepare claim", "column payload"},
		"ALTER TABLE pgmill_messages ALTER COLUMN due_at DROP DEFAULT, ALTER COLUMN due_at TYPE int USING 1":      {"prepare insert", "due_at"},
		"ALTER TABLE pgmill_messages ALTER COLUMN locked_until TYPE text":                                         {"prepare claim", "text"},
		"ALTER TABLE pgmill_messages ALTER COLUMN created_at TYPE timestamp":                                      {"prepare claim", "column created_at"},
		"ALTER TABLE pgmill_messages ALTER COLUMN attempt TYPE int":                                               {"prepare claim", "column attempt"},
		"ALTER TABLE pgmill_messages ALTER COLUMN uuid DROP DEFAULT, ALTER COLUMN uuid TYPE bytea USING ''":       {"prepare insert", "uuid"},
	} {
		t.Run(ddl, func(t *testing.T) {
			b.exec("BEGIN; %s", ddl)
			defer b.exec("ROLLBACK")
			err := Check(t.Context(), b.conn, Default(), b.insert, b.lease)
			require.ErrorIs(t, err, ErrSchema)
			require.ErrorContains(t, err, "check table public.pgmill_messages: ")
			for _, part := range says {
				require.ErrorContains(t, err, part)
			}
		})
	}
}

func TestCheckExecutesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 3)
	before := b.text("SELECT string_agg(m::text, ' ' ORDER BY id) FROM pgmill_messages AS m")
	require.NoError(t, Check(t.Context(), b.conn, Default(), b.insert, b.lease))
	require.Equal(t, before, b.text("SELECT string_agg(m::text, ' ' ORDER BY id) FROM pgmill_messages AS m"))
	require.Equal(t, "0", b.text("SELECT count(*) FROM pg_prepared_statements WHERE statement NOT LIKE '%%Insert:%%'"), "nothing stays prepared")
}

// Where the server did not refuse it, it is no mistake of the schema.
func TestCheckThatWasNotAnsweredIsNoSchemaError(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := Check(ctx, b.conn, Default(), b.insert)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrSchema)
}
