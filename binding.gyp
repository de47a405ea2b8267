{
  # What node-gyp and prebuildify see: one target that delegates to the CMake build, which is described in CMakeLists.txt only.
  "targets": [
    {
      "target_name": "coat_fp8",
      "type": "none",
      "actions": [
        {
          "action_name": "cmake",
          "message": "coat_fp8: building through cmake-js",
          "inputs": [ "<!@(node scripts/build-native.cjs --list-inputs)" ],
          "outputs": [ "<(PRODUCT_DIR)/coat_fp8.node" ],
          "action": [ "node", "scripts/build-native.cjs", "--config", "<(CONFIGURATION_NAME)", "--product-dir", "<(PRODUCT_DIR)" ]
        }
      ]
    }
  ]
}
