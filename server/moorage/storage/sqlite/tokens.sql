-- Named tokens, and every statement on them.

-- name: schema
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT

-- name: rows
SELECT name, digest, role, tenant, created_at, expires_at, revoked_at FROM tokens ORDER BY name

-- name: insert
INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: revoked_at
SELECT revoked_at FROM tokens WHERE name = ?

-- name: revoke
UPDATE tokens SET revoked_at = ? WHERE name = ?
