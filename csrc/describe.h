// The table as TypeScript.
#pragma once
#include <string>

namespace coat {
std::string describe();
}
