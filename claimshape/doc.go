// Package claimshape describes queue tables and speaks to them: it renders a table's statements, claims and
// settles rows, and decodes what the server answers. It knows pgx and nothing of Watermill; the root package
// turns rows into messages.
//
// A claim shape is how a claimed row is held. Lease is the shape of this version: the claim writes
// locked_until, which is also the token that every later statement about the row must name.
//
// All times are the database's; the application sends durations only. All statements name their columns and
// their schema, so that neither search_path nor a new column changes what they mean.
package claimshape
