# SPDX-License-Identifier: Apache-2.0
"""What the GPU backends share: device, arrays, caches, steps."""
