package pgtest

import (
	"net"
	"net/url"
	"strings"
)

// withDatabase returns the DSN with another database. Of a parameter that a keyword DSN gives twice,
// the last counts.
func withDatabase(dsn, database string) string {
	u, ok := parseURL(dsn)
	if !ok {
		return dsn + " dbname=" + database
	}
	u.Path = "/" + database
	return u.String()
}

// withAddress returns the DSN with another host and port, and without TLS.
func withAddress(dsn, address string) string {
	u, ok := parseURL(dsn)
	if !ok {
		host, port, _ := net.SplitHostPort(address)
		return dsn + " host=" + host + " port=" + port + " sslmode=disable"
	}
	u.Host = address
	q := u.Query()
	q.Del("host")
	q.Del("port")
	q.Set("sslmode", "disable")
	u.RawQuery = q.Encode()
	return u.String()
}

func parseURL(dsn string) (*url.URL, bool) {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return nil, false
	}
	u, err := url.Parse(dsn)
	return u, err == nil
}
