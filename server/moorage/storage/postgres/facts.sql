-- The ledger's statements. No statement looks at more rows than it returns, but for `used_bytes`.

-- name: insert
-- The fence and the facts are one statement: stopped between two, a server would hold up the next.
WITH e AS (SELECT 1 FROM epoch WHERE id = 1 AND epoch = %s FOR SHARE)
INSERT INTO fact SELECT u.* FROM e, unnest(
    %s::bigint[], %s::float8[], %s::text[], %s::int[], %s::bytea[], %s::text[], %s::bigint[],
    %s::bigint[]) u

-- name: fencing
SELECT value FROM meta WHERE name = 'fencing'

-- name: set_fencing
WITH e AS (SELECT 1 FROM epoch WHERE id = 1 AND epoch = %s FOR SHARE)
UPDATE meta SET value = %s FROM e WHERE name = 'fencing'

-- name: pruned
SELECT value FROM meta WHERE name = 'pruned'

-- name: set_pruned
UPDATE meta SET value = %s WHERE name = 'pruned'

-- name: last
SELECT coalesce(max(seq), 0) FROM fact

-- name: chain
SELECT chain FROM fact WHERE seq = %s

-- name: after
SELECT seq, at, kind, version, subject, body, checksum, chain FROM (
    SELECT *, sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS bytes_before
    FROM (SELECT * FROM fact WHERE seq > %s ORDER BY seq LIMIT %s) f) p
WHERE bytes_before <= %s ORDER BY seq

-- name: about
SELECT seq, at, kind, version, subject, body, checksum, chain FROM (
    SELECT *, sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS bytes_before
    FROM (SELECT * FROM fact WHERE subject = %s AND seq > %s ORDER BY seq LIMIT %s) f) p
WHERE bytes_before <= %s ORDER BY seq

-- name: oldest
SELECT seq, at FROM fact WHERE seq < %s ORDER BY seq LIMIT %s

-- name: oldest_at
SELECT at FROM fact ORDER BY seq LIMIT 1

-- name: used_bytes
-- As many facts as there are, each of the size of the newest thousand and a row's own bytes.
SELECT coalesce(((SELECT max(seq) - min(seq) + 1 FROM fact) *
    (SELECT avg(octet_length(body) + 120)
     FROM (SELECT body FROM fact ORDER BY seq DESC LIMIT 1000) newest))::bigint, 0)

-- name: delete_to
DELETE FROM fact WHERE seq <= %s

-- name: checkpoints
SELECT number, seq, parts, checksum FROM checkpoint ORDER BY number DESC

-- name: last_checkpoint_number
SELECT greatest((SELECT max(number) FROM checkpoint), (SELECT max(checkpoint) FROM checkpoint_part))

-- name: parts
SELECT body FROM checkpoint_part WHERE checkpoint = %s ORDER BY number

-- name: insert_part
INSERT INTO checkpoint_part VALUES (%s, %s, %s)

-- name: insert_checkpoint
INSERT INTO checkpoint VALUES (%s, %s, %s, %s)

-- name: delete_old_checkpoints
DELETE FROM checkpoint WHERE number NOT IN
(SELECT number FROM checkpoint ORDER BY number DESC LIMIT %s)

-- name: delete_checkpoint
DELETE FROM checkpoint WHERE number = %s

-- name: sweep
DELETE FROM checkpoint_part WHERE ctid IN (SELECT ctid FROM checkpoint_part
WHERE checkpoint NOT IN (SELECT number FROM checkpoint) LIMIT %s)
