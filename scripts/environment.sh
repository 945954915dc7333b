# The folder and the versions of everything that the test set-up fetches. Sourced by the scripts beside it.
#
# tests/support/src/cache.rs uses the same folder: change both or neither.
#
# shellcheck shell=bash
# shellcheck disable=SC2034  # used by the scripts that source this file

if [[ -n ${WHARF_TEST_CACHE:-} ]]; then
    cache=$WHARF_TEST_CACHE
elif [[ $(id -u) == 0 ]]; then
    # Not in root's home: the servers run under an unprivileged account, which cannot enter it.
    cache=/var/cache/wharf-test
else
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/wharf-test
fi

# The oldest and the newest PostgreSQL that the suite runs on, besides the one of the machine.
postgres_oldest=14.15.0
postgres_newest=18.1.0

# Prepared statements in transaction mode need 1.21. Debian 12 has 1.18, so the source of Debian 13 is built.
pgbouncer_minimum=1.21
pgbouncer_suite=trixie

kafka_version=4.3.0
slf4j_version=1.7.36
maven_dependency_plugin=org.apache.maven.plugins:maven-dependency-plugin:3.8.1

postgres_folder() { # version
    echo "$cache/postgresql-$1"
}
