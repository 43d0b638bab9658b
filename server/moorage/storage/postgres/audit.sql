-- Statements on the audit log.

-- name: lock_end
SELECT number, hash, seq FROM audit_end WHERE id = 1 FOR UPDATE

-- name: end
SELECT number, hash, seq FROM audit_end WHERE id = 1

-- name: insert
INSERT INTO audit_line
SELECT %(after)s + place, %(at)s, line
FROM unnest(%(lines)s::bytea[]) WITH ORDINALITY AS given(line, place)

-- name: set_end
UPDATE audit_end SET number = %s, hash = %s, seq = %s, bytes = bytes + %s WHERE id = 1

-- name: page
SELECT number, line FROM audit_line WHERE number > %s ORDER BY number LIMIT 1000

-- name: begin
-- Line 0 is the last deleted one, or its number and hash: so a missing first line is noticed.
SELECT line FROM audit_line WHERE number = 0

-- name: note_begin
INSERT INTO audit_line VALUES (0, 0, %s) ON CONFLICT DO NOTHING

-- name: prune_old
WITH gone AS (DELETE FROM audit_line WHERE number IN (
    SELECT number FROM audit_line WHERE number > 0 ORDER BY number LIMIT 1000) AND at < %s
    RETURNING number, at, line),
kept AS (INSERT INTO audit_line SELECT 0, at, line FROM gone ORDER BY number DESC LIMIT 1
    ON CONFLICT (number) DO UPDATE SET at = excluded.at, line = excluded.line)
UPDATE audit_end SET bytes = bytes - coalesce((SELECT sum(octet_length(line)) FROM gone), 0)
WHERE id = 1 AND EXISTS (SELECT FROM gone)

-- name: prune_more
WITH gone AS (DELETE FROM audit_line WHERE number IN (
    SELECT number FROM audit_line WHERE number > 0 ORDER BY number LIMIT 1000)
    AND (SELECT bytes FROM audit_end) > %s
    RETURNING number, at, line),
kept AS (INSERT INTO audit_line SELECT 0, at, line FROM gone ORDER BY number DESC LIMIT 1
    ON CONFLICT (number) DO UPDATE SET at = excluded.at, line = excluded.line)
UPDATE audit_end SET bytes = bytes - coalesce((SELECT sum(octet_length(line)) FROM gone), 0)
WHERE id = 1 AND EXISTS (SELECT FROM gone)
