#!/usr/bin/env bash
# A browser for the tests of the HTML pages: the Chromium that is there, else Debian's, else Playwright's own download.
# scripts/get_browser.sh BIN   with BIN the folder of the environment in which playwright is installed
set -euo pipefail
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends chromium fonts-liberation >/dev/null
else
    "$1/playwright" install chromium
fi
