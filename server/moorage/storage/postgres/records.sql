-- The catalog's statements.

-- name: get
SELECT id, document, files, checksum FROM record WHERE kind = %s AND id = %s

-- name: has
SELECT 1 FROM record WHERE kind = %s AND id = %s

-- name: ids
SELECT id FROM record WHERE kind = %s ORDER BY number

-- name: rows
SELECT number, id, document, files, checksum FROM record WHERE kind = %s ORDER BY id

-- name: put
INSERT INTO record (kind, id, document, files, checksum) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (kind, id) DO UPDATE SET document = excluded.document, files = excluded.files,
    checksum = excluded.checksum

-- name: remove
DELETE FROM record WHERE kind = %s AND id = %s

-- name: number
SELECT number FROM record WHERE kind = %s AND id = %s

-- name: set_aside
WITH gone AS (DELETE FROM record WHERE number = %s RETURNING kind, id, document, files, checksum)
INSERT INTO damaged SELECT *, %s FROM gone

-- name: count
SELECT count(*) FROM record WHERE kind = %s

-- name: usage
SELECT kind, records, bytes FROM usage

-- name: marks
SELECT kind, records, bytes, checksums FROM usage

-- name: checksums
SELECT id, checksum FROM record WHERE kind = %s

-- name: tallies
SELECT kind, u.records, u.checksums, count(r.id), coalesce(sum(r.checksum), 0)::bigint
FROM usage u LEFT JOIN record r USING (kind) GROUP BY kind, u.records, u.checksums

-- name: take_tally
UPDATE usage SET checksums =
    (SELECT coalesce(sum(checksum), 0) FROM record r WHERE r.kind = usage.kind)
WHERE kind = %s
