-- The tables of a server, in the schema `moorage`, as its first format has them.

-- name: schema
CREATE SCHEMA IF NOT EXISTS moorage;
SET search_path = moorage;
CREATE TABLE meta(name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO meta VALUES ('format', 1), ('pruned', 0), ('fencing', 0), ('tokens', 0), ('agents', 0);
CREATE TABLE release(version text NOT NULL);
INSERT INTO release VALUES ('');
CREATE TABLE epoch(id int PRIMARY KEY CHECK (id = 1), epoch bigint NOT NULL);
INSERT INTO epoch VALUES (1, 0);
-- Apart from the epoch, whose row each commit locks: a beat would wait for them, and they for it.
CREATE TABLE leader(
    id int PRIMARY KEY CHECK (id = 1), epoch bigint NOT NULL, at timestamptz NOT NULL,
    since timestamptz NOT NULL, name text NOT NULL, ws text NOT NULL, http text NOT NULL,
    pid int NOT NULL, resign boolean NOT NULL);
CREATE TABLE standby(
    name text PRIMARY KEY, at timestamptz NOT NULL, ws text NOT NULL, http text NOT NULL);
-- Text that users choose is stored as its bytes: PostgreSQL's own type has no NUL.
CREATE TABLE fact(
    seq bigint PRIMARY KEY, at float8 NOT NULL, kind text NOT NULL, version int NOT NULL,
    subject bytea NOT NULL, body text NOT NULL, checksum bigint NOT NULL, chain bigint NOT NULL);
CREATE INDEX fact_by_subject ON fact(subject, seq);
CREATE TABLE checkpoint(
    number bigint PRIMARY KEY, seq bigint NOT NULL, parts bigint NOT NULL, checksum bigint NOT NULL);
CREATE TABLE checkpoint_part(
    checkpoint bigint NOT NULL, number bigint NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (checkpoint, number));
CREATE TABLE record(
    number bigint GENERATED ALWAYS AS IDENTITY, kind text NOT NULL, id bytea NOT NULL,
    document bytea NOT NULL, files bytea NOT NULL, checksum bigint NOT NULL,
    PRIMARY KEY (kind, id));
CREATE INDEX record_by_number ON record(number);
CREATE TABLE damaged(
    kind text, id bytea, document bytea, files bytea, checksum bigint, why text NOT NULL);
-- `usage` follows `record` by a trigger, so that limits are checked in the transaction that would
-- break them, without counting rows, and that a record cannot go missing without a word.
CREATE TABLE usage(
    kind text PRIMARY KEY, records bigint NOT NULL, bytes bigint NOT NULL,
    checksums bigint NOT NULL);
INSERT INTO usage SELECT kind, 0, 0, 0 FROM unnest(ARRAY[
    'cluster', 'metrics', 'policy', 'alias', 'context', 'executor', 'history', 'block',
    'block_metrics']) kind;
CREATE FUNCTION count_record() RETURNS trigger LANGUAGE plpgsql SET search_path = moorage AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE usage SET records = records - 1, checksums = checksums - old.checksum,
            bytes = bytes - octet_length(old.document) - octet_length(old.files)
        WHERE kind = old.kind;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE usage SET records = records + 1, checksums = checksums + new.checksum,
            bytes = bytes + octet_length(new.document) + octet_length(new.files)
        WHERE kind = new.kind;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER record_counted AFTER INSERT OR UPDATE OR DELETE ON record
    FOR EACH ROW EXECUTE FUNCTION count_record();
CREATE TABLE token(
    name text PRIMARY KEY, digest text NOT NULL UNIQUE, role text NOT NULL, tenant text NOT NULL,
    created_at float8 NOT NULL, expires_at float8, revoked_at float8);
CREATE TABLE agent(key text PRIMARY KEY, document bytea NOT NULL);
CREATE TABLE secret(name text PRIMARY KEY, value bytea NOT NULL);

-- name: add_audit
-- What the second format adds: the audit log, whose lines several servers chain in turn.
CREATE TABLE audit_line(number bigint PRIMARY KEY, at float8 NOT NULL, line bytea NOT NULL);
CREATE TABLE audit_end(
    id int PRIMARY KEY CHECK (id = 1), number bigint NOT NULL, hash text NOT NULL, seq bigint,
    bytes bigint NOT NULL);
INSERT INTO audit_end VALUES (1, 0, repeat('0', 64), NULL, 0)

-- name: add_logins
-- What the third format adds: logins to the console, which outlast the server that let them in.
CREATE TABLE login(
    number bigint GENERATED ALWAYS AS IDENTITY, digest text PRIMARY KEY, document bytea NOT NULL);
INSERT INTO meta VALUES ('logins', 0)

-- name: make_alone
-- Commands make the tables, too, and without being the one who writes.
SELECT pg_advisory_xact_lock(1836019570, 2)

-- name: exists
SELECT EXISTS (SELECT FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
    WHERE n.nspname = 'moorage' AND c.relname = 'meta'),
    has_database_privilege(current_database(), 'CREATE')

-- name: begin_copy
INSERT INTO meta VALUES ('copying', 1) ON CONFLICT DO NOTHING

-- name: end_copy
DELETE FROM meta WHERE name = 'copying'

-- name: copying
SELECT EXISTS (SELECT FROM meta WHERE name = 'copying')

-- name: format
SELECT value FROM meta WHERE name = 'format'

-- name: set_format
UPDATE meta SET value = %s WHERE name = 'format'

-- name: writer
SELECT version FROM release

-- name: set_writer
UPDATE release SET version = %s

-- name: secret
SELECT value FROM secret WHERE name = 'lease'

-- name: insert_secret
INSERT INTO secret VALUES ('lease', %s) ON CONFLICT DO NOTHING

-- name: name
SELECT value FROM secret WHERE name = %s

-- name: names
SELECT value FROM secret WHERE starts_with(name, %s) ORDER BY name

-- name: insert_name
INSERT INTO secret VALUES (%s, %s) ON CONFLICT DO NOTHING

-- name: put_secret
INSERT INTO secret VALUES ('lease', %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: try_lock
SELECT pg_try_advisory_lock(1836019570, 1)

-- name: holder
SELECT a.application_name, a.backend_start::text, coalesce(host(a.client_addr), 'its socket')
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 1836019570 AND l.objid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())

-- name: facts_of_server
SELECT pg_is_in_recovery(), current_setting('server_encoding'), pg_backend_pid(),
    current_setting('server_version_num')::int

-- name: take_epoch
UPDATE epoch SET epoch = epoch + 1 WHERE id = 1 RETURNING epoch

-- name: rename
SELECT set_config('application_name', %s, false)

-- name: epoch
SELECT epoch FROM epoch

-- name: end_holders
-- Those that lock the row of the epoch are commits of the server before, which it never acknowledged.
SELECT pg_terminate_backend(pid) FROM pg_locks
WHERE relation = 'moorage.epoch'::regclass AND mode = 'RowShareLock' AND pid <> pg_backend_pid()

-- name: lead
WITH no_standby AS (DELETE FROM standby WHERE name = %(name)s)
INSERT INTO leader VALUES (
    1, %(epoch)s, clock_timestamp(), clock_timestamp(), %(name)s, %(ws)s, %(http)s,
    pg_backend_pid(), false)
ON CONFLICT (id) DO UPDATE SET epoch = excluded.epoch, at = excluded.at, since = excluded.since,
    name = excluded.name, ws = excluded.ws, http = excluded.http, pid = excluded.pid,
    resign = false

-- name: beat
UPDATE leader SET at = clock_timestamp() WHERE id = 1 AND epoch = %s RETURNING resign

-- name: leader
SELECT name, ws, http, epoch, extract(epoch FROM since)::float8,
    extract(epoch FROM clock_timestamp() - at)::float8 FROM leader

-- name: depose
-- The lock of a server that has not beaten for that long; never that of a command.
SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN leader h ON h.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 1836019570 AND l.objid = 1
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND h.at < clock_timestamp() - make_interval(secs => %s)

-- name: leave
DELETE FROM leader WHERE epoch = %s

-- name: unlock
-- At once, unlike by the end of the connection; those that wait for it try again.
SELECT pg_advisory_unlock_all(), pg_notify('moorage', '')

-- name: listen
LISTEN moorage

-- name: announce
SELECT pg_notify('moorage', %s)

-- name: resign
UPDATE leader SET resign = true WHERE at > clock_timestamp() - make_interval(secs => %s)

-- name: stand_by
WITH gone AS (
    DELETE FROM standby WHERE at < clock_timestamp() - interval '1 minute' AND name <> %(name)s)
INSERT INTO standby VALUES (%(name)s, clock_timestamp(), %(ws)s, %(http)s)
ON CONFLICT (name) DO UPDATE SET at = excluded.at, ws = excluded.ws, http = excluded.http

-- name: standbys
SELECT name, ws, http FROM standby WHERE at > clock_timestamp() - make_interval(secs => %s)
ORDER BY name

-- name: sit_down
DELETE FROM standby WHERE name = %s

-- name: fence
SELECT 1 FROM epoch WHERE id = 1 AND epoch = %s FOR SHARE

-- name: settings
SELECT name, setting FROM pg_settings WHERE name IN (
    'default_transaction_read_only', 'fsync', 'full_page_writes', 'synchronous_commit',
    'synchronous_standby_names',
    'server_version', 'ssl')

-- name: clock
SELECT extract(epoch FROM clock_timestamp())::float8

-- name: keep_commits
-- An acknowledged fact must outlive the power of the machine.
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'

-- name: use_grants
SELECT CASE WHEN has_schema_privilege('moorage', 'USAGE') THEN (
    SELECT bool_and(has_table_privilege(c.oid, needed)) FROM pg_class c,
        unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) needed
    WHERE c.relnamespace = 'moorage'::regnamespace AND c.relkind = 'r') ELSE false END
