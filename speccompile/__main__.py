# SPDX-License-Identifier: Apache-2.0
"""python -m speccompile."""

import sys

from speccompile.cli.main import main

sys.exit(main())
